"""T5 (Raffel et al. 2019, arXiv 1910.10683) and Switch Transformer (Fedus et al. 2021, arXiv 2101.03961)."""

from __future__ import annotations

from typing import Any

from mercer.checkpoints.families.decoders import pairs
from mercer.checkpoints.families.seq2seq import attention, build, refuse
from mercer.checkpoints.family import Family
from mercer.checkpoints.keys import Keys
from mercer.checkpoints.mapping import Names, Rule, Twin, same
from mercer.checkpoints.source import Source
from mercer.errors import Unsupported
from mercer.models.experts_config import ExpertsConfig
from mercer.models.seq2seq_config import Seq2SeqConfig
from mercer.nn.activations import GATED, default_hidden

_KINDS = {"relu": "relu", "gated-gelu": "geglu_tanh", "gated-silu": "swiglu"}
_WRITTEN = {"relu": "relu", "geglu_tanh": "gated-gelu", "swiglu": "gated-silu"}
_PROJECTIONS = ("q", "k", "v", "o")


def _read_common(keys: Keys) -> dict[str, Any]:
    """What the two call alike."""
    keys.must_be("is_encoder_decoder", True)
    keys.must_be("is_decoder", False)
    keys.aside("n_positions", "dense_act_fn", "is_gated_act")
    layers = keys.take("num_layers", kind=int)
    return {
        "vocab_size": keys.take("vocab_size", kind=int),
        "dim": keys.take("d_model", kind=int),
        "encoder_layers": layers,
        "layers": keys.take("num_decoder_layers", None, kind=int) or layers,
        "heads": keys.take("num_heads", kind=int),
        "head_dim": keys.take("d_kv", 64, kind=int),
        "hidden": keys.take("d_ff", kind=int),
        "norm_eps": keys.take("layer_norm_epsilon", 1e-6, kind=float),
        "attention_scale": 1.0,
        "position": "t5",
        "t5_buckets": keys.take("relative_attention_num_buckets", 32, kind=int),
        "t5_max_distance": keys.take("relative_attention_max_distance", 128, kind=int),
        "start_token": keys.take("decoder_start_token_id", 0, kind=int),
    }


def _write_common(config: Seq2SeqConfig, family: str, **allowed: Any) -> dict[str, Any]:
    refuse(
        config,
        family,
        kv_heads=(None, config.heads),
        attention_scale=(1.0,),
        position=("t5",),
        **dict.fromkeys(("head_dim", "norm_eps", "t5_buckets", "t5_max_distance", "max_source")),
        **allowed,
    )
    return {
        "vocab_size": config.vocab_size,
        "d_model": config.dim,
        "num_layers": config.encoder_layers,
        "num_decoder_layers": config.layers,
        "num_heads": config.heads,
        "d_kv": config.head_size,
        "d_ff": default_hidden(config.dim, config.feedforward) if config.hidden is None else config.hidden,
        "layer_norm_epsilon": config.norm_eps,
        "relative_attention_num_buckets": config.t5_buckets,
        "relative_attention_max_distance": config.t5_max_distance,
        "decoder_start_token_id": config.start_token,
        "is_encoder_decoder": True,
        "tie_word_embeddings": config.tie_embeddings,
    }


def _read_t5(keys: Keys, _architecture: str) -> Seq2SeqConfig:
    common = _read_common(keys)
    tied = keys.take("tie_word_embeddings", True, kind=bool)
    scaled = keys.take("scale_decoder_outputs", tied, kind=bool)
    return Seq2SeqConfig(
        **common,
        feedforward=keys.one_of("feed_forward_proj", _KINDS, "relu"),
        tie_embeddings=tied,
        score_scale=common["dim"] ** -0.5 if scaled else 1.0,
    )


def _settle_t5(config: Seq2SeqConfig, keys: Keys, source: Source) -> Seq2SeqConfig:
    """transformers 5 writes tie_word_embeddings = true for every T5, beside scale_decoder_outputs, and leaves it to the
    tensors whether T5 1.1 scores tokens with a head of its own."""
    head, table = "lm_head.weight", "shared.weight"
    left_to_tensors = config.tie_embeddings and "scale_decoder_outputs" in keys and {head, table} <= source.names
    if not left_to_tensors or source.equal(head, table):
        return config
    return Seq2SeqConfig(**{**config.model_dump(), "tie_embeddings": False})


def _write_t5(config: Seq2SeqConfig) -> dict[str, Any]:
    common = _write_common(config, "t5", feedforward=_WRITTEN, tie_embeddings=None, score_scale=(1.0, config.dim**-0.5))
    return {
        **common,
        "feed_forward_proj": _WRITTEN[config.feedforward],
        "scale_decoder_outputs": config.score_scale != 1,
    }


def _read_switch(keys: Keys, _architecture: str) -> Seq2SeqConfig:
    keys.must_be("tie_word_embeddings", True)
    keys.must_be("add_cross_attention", False)
    keys.must_be("feed_forward_proj", "relu")
    keys.must_be("router_bias", False)
    keys.must_be("router_dtype", "float32")
    keys.must_be("router_type", "tokens_masked")
    keys.must_be("batch_prioritized_routing", False)
    keys.aside(
        "router_jitter_noise",  # of training
        "router_ignore_padding_tokens",  # padding takes no place here
        "add_router_probs",
        "num_sparse_encoder_layers",  # which the steps follow from
        "num_sparse_decoder_layers",
        "num_selected_experts",
    )
    common = _read_common(keys)
    made = {
        "count": keys.take("num_experts", 8, kind=int),
        "chosen": 1,
        "renormalise": False,
        "capacity": keys.take("expert_capacity", 64, kind=int),
        "balance": keys.take("router_aux_loss_coef", 0.001, kind=float),
        "z_loss": keys.take("router_z_loss_coef", 0.001, kind=float),
    }
    experts: dict[str, ExpertsConfig | None] = {}
    for name, side in (("encoder_experts", "encoder"), ("experts", "decoder")):
        step = keys.take(f"{side}_sparse_step", kind=int)
        layers = common["encoder_layers" if side == "encoder" else "layers"]
        offset = 1 if step > 1 else 0
        experts[name] = ExpertsConfig(**made, every=step, offset=offset) if step > 0 and offset < layers else None
    return Seq2SeqConfig(**common, **experts, feedforward="relu", score_scale=common["dim"] ** -0.5)


def _write_switch(config: Seq2SeqConfig) -> dict[str, Any]:
    sides = (("encoder", config.encoder_experts, config.encoder_layers), ("decoder", config.experts, config.layers))
    common = _write_common(
        config,
        "switch_transformers",
        feedforward=("relu",),
        score_scale=(config.dim**-0.5,),
        experts=None,
        encoder_experts=None,
    )
    values: dict[str, Any] = {}
    made = next((experts for _, experts, _ in sides if experts is not None), None)
    if made is None:
        raise Unsupported("switch_transformers has experts")
    for side, experts, layers in sides:
        same_made = experts is None or experts.model_copy(update={"every": made.every, "offset": made.offset}) == made
        if not same_made or made.chosen != 1 or made.renormalise or made.capacity is None or made.router_bias:
            raise Unsupported(f"switch_transformers has no way to say experts = {experts!r}")
        step = 0 if experts is None else experts.every
        if experts is not None and experts.offset != (1 if step > 1 else 0):
            raise Unsupported(f"switch_transformers has no way to say experts = {experts!r}")
        values[f"num_sparse_{side}_layers"] = 0 if experts is None else max(layers // step, 1)
        values[f"{side}_sparse_step"] = step
    return {
        **common,
        **values,
        "num_experts": made.count,
        "expert_capacity": made.capacity,
        "router_aux_loss_coef": made.balance,
        "router_z_loss_coef": made.z_loss,
    }


def _attention_rules(config: Seq2SeqConfig, here: str, there: str, decoder: bool) -> list[Rule]:
    rules = attention(f"{here}.attention", f"{there}.layer.0.SelfAttention", config, _PROJECTIONS)
    if decoder:
        rules += attention(f"{here}.cross", f"{there}.layer.1.EncDecAttention", config, _PROJECTIONS, cross=True)
    norms = ("attention_norm", "cross_norm", "feedforward_norm") if decoder else ("attention_norm", "feedforward_norm")
    return rules + pairs(
        {f"{here}.{norm}": f"{there}.layer.{i}.layer_norm" for i, norm in enumerate(norms)}, ["weight"]
    )


def _dense_rules(config: Seq2SeqConfig, here: str, there: str) -> list[Rule]:
    outward = same(f"{here}.output.weight", f"{there}.wo.weight")
    if config.feedforward not in GATED:
        return [same(f"{here}.input.weight", f"{there}.wi.weight"), outward]
    gates = (f"{there}.wi_0.weight", f"{there}.wi_1.weight")
    hidden = default_hidden(config.dim, config.feedforward) if config.hidden is None else config.hidden
    return [Rule(f"{here}.input.weight", gates, rows=(hidden, hidden)), outward]


def _expert_rules(config: Seq2SeqConfig, experts: ExpertsConfig, here: str, there: str) -> list[Rule]:
    hidden = default_hidden(config.dim, config.feedforward) if config.hidden is None else config.hidden
    count, dim = experts.count, config.dim
    rules = pairs({f"{here}.router": f"{there}.router.classifier"}, ["weight"])
    for ours, theirs, shape in (("input", "wi", (count, hidden, dim)), ("output", "wo", (count, dim, hidden))):
        each = tuple(f"{there}.experts.expert_{e}.{theirs}.weight" for e in range(count))
        rows = (shape[1],) * count if count > 1 else ()
        rules.append(Rule(f"{here}.{ours}.weight", each, rows=rows, shape=shape))
    return rules


def _names(config: Seq2SeqConfig, dense: str) -> Names:
    rules = [same("embedding.weight", "shared.weight")]
    sides = (("encoder", config.encoder_experts, config.encoder_layers), ("decoder", config.experts, config.layers))
    for side, experts, layers in sides:
        decoder = side == "decoder"
        bias = f"{side}.block.0.layer.0.SelfAttention.relative_attention_bias.weight"
        rules += [same(f"{side}.relative.weight", bias), same(f"{side}.norm.weight", f"{side}.final_layer_norm.weight")]
        for i in range(layers):
            here, there = f"{side}.blocks.{i}", f"{side}.block.{i}"
            rules += _attention_rules(config, here, there, decoder)
            place = f"{there}.layer.{2 if decoder else 1}.{dense}"
            if experts is not None and experts.at(i):
                rules += _expert_rules(config, experts, f"{here}.feedforward", place)
            else:
                rules += _dense_rules(config, f"{here}.feedforward", place)
    copies = ["encoder.embed_tokens.weight", "decoder.embed_tokens.weight"]
    if config.tie_embeddings:
        copies.append("lm_head.weight")
    else:
        rules += pairs({"head": "lm_head"}, ["weight"])
    # An old file has a table in the attention to the memory, which is not used.
    unused = (r"decoder\.block\.0\.layer\.1\.EncDecAttention\.relative_attention_bias\.weight",)
    return Names(tuple(rules), tuple(Twin(name, "shared.weight") for name in copies), unused)


FAMILIES = (
    Family(
        name="t5",
        architectures=("T5ForConditionalGeneration", "T5WithLMHeadModel"),  # the second is the first's old name
        read_config=_read_t5,
        write_config=_write_t5,
        build=build,
        names=lambda config: _names(config, "DenseReluDense"),
        config=Seq2SeqConfig,
        settled=_settle_t5,
    ),
    Family(
        name="switch_transformers",
        architectures=("SwitchTransformersForConditionalGeneration",),
        read_config=_read_switch,
        write_config=_write_switch,
        build=build,
        names=lambda config: _names(config, "mlp"),
        config=Seq2SeqConfig,
    ),
)
