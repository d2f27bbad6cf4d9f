"""ViT (Dosovitskiy et al. 2021, arXiv 2010.11929)."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.bert import labels
from mercer.checkpoints.families.decoders import ACTIVATIONS, WRITTEN, hidden_of, pairs, refuse_all_but
from mercer.checkpoints.families.encoders import BOTH, bert_layer, class_count, gathered
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule
from mercer.models.vision import VisionEncoder
from mercer.models.vision_config import VisionConfig

_WITHOUT_QKV = ("output", "feedforward", "norm")


def _read(keys: Keys, architecture: str) -> VisionConfig:
    dim = keys.take("hidden_size", kind=int)
    keys.aside("encoder_stride")  # of images that are painted again
    head: dict[str, Any] = {"pool": True}
    if architecture.endswith("ForImageClassification"):
        head = {"head": "classes", "classes": class_count(keys)}
        keys.aside("pooler_act", "pooler_output_size")
    else:
        keys.must_be("pooler_act", "tanh")
        keys.must_be("pooler_output_size", dim, why="the pooled token has the channels of the others")
    return VisionConfig(
        dim=dim,
        layers=keys.take("num_hidden_layers", kind=int),
        heads=keys.take("num_attention_heads", kind=int),
        hidden=keys.take("intermediate_size", kind=int),
        feedforward=keys.one_of("hidden_act", ACTIVATIONS, "gelu"),
        norm="layer",
        norm_eps=keys.take("layer_norm_eps", 1e-12, kind=float),
        bias=True if keys.take("qkv_bias", True, kind=bool) else _WITHOUT_QKV,
        image=keys.take("image_size", 224, kind=(int, list)),
        patch=keys.take("patch_size", 16, kind=(int, list)),
        channels=keys.take("num_channels", 3, kind=int),
        **head,
    )


def _write(config: VisionConfig) -> dict[str, Any]:
    refuse_all_but(
        config,
        "vit",
        feedforward=WRITTEN,
        norm=("layer",),
        bias=(True, _WITHOUT_QKV),
        kv_heads=(None, config.heads),
        head_dim=(None, config.dim // config.heads),
        pool=(config.head == "none",),
        **dict.fromkeys(("hidden", "norm_eps", "image", "patch", "channels", "head", "classes")),
    )
    values = {
        "architectures": ["ViTModel" if config.classes is None else "ViTForImageClassification"],
        "hidden_size": config.dim,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "intermediate_size": hidden_of(config),
        "hidden_act": WRITTEN[config.feedforward],
        "layer_norm_eps": config.norm_eps,
        "image_size": _side(config.image),
        "patch_size": _side(config.patch),
        "num_channels": config.channels,
        "qkv_bias": config.bias is True,
    }
    return values if config.classes is None else values | labels(config.classes)


def _side(size: tuple[int, int]) -> int | list[int]:
    """One number for a square, which is what most programs read."""
    return size[0] if size[0] == size[1] else list(size)


def _names(config: VisionConfig) -> Names:
    there, dim = "vit.embeddings", config.dim
    kernel = (dim, config.channels, *config.patch)
    rows = 1 + config.patches
    rules = [
        Rule("class_token", (f"{there}.cls_token",), shape=(dim,), stored=(1, 1, dim)),
        Rule("positions.weight", (f"{there}.position_embeddings",), shape=(rows, dim), stored=(1, rows, dim)),
        Rule(
            "patches.weight",
            (f"{there}.patch_embeddings.projection.weight",),
            shape=(dim, config.channels * config.patch[0] * config.patch[1]),
            stored=kernel,
        ),
        Rule("patches.bias", (f"{there}.patch_embeddings.projection.bias",)),
        *pairs({"norm": "vit.layernorm"}, BOTH),
    ]
    for i in range(config.layers):
        here, layer = f"blocks.{i}", f"vit.encoder.layer.{i}"
        norms = {"attention_norm": "layernorm_before", "feedforward_norm": "layernorm_after"}
        rules += bert_layer(here, layer, config, attention="attention.attention")
        rules += pairs({f"{here}.{ours}": f"{layer}.{theirs}" for ours, theirs in norms.items()}, BOTH)
    if config.pool:
        rules += pairs({"pooler": "vit.pooler.dense"}, BOTH)
    if config.classes is not None:
        rules += pairs({"classes": "classifier"}, BOTH)
    return gathered(rules)


FAMILIES = (
    Family(
        name="vit",
        architectures=("ViTForImageClassification", "ViTModel"),
        read_config=_read,
        write_config=_write,
        build=VisionEncoder,
        names=_names,
        config=VisionConfig,
        prefix="vit.",
    ),
)
