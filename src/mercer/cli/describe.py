"""What `mercer info` says of a model, of any class that a checkpoint may hold, as JSON values."""

from __future__ import annotations

from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import nn

    from mercer.checkpoints import Checkpoint

CONTEXTS = (256, 1024, 4096, 16384, 65536)


def facts_of(opened: Checkpoint) -> dict[str, Any]:
    """Architecture, parameters, context, vocabulary, and every layer with the bytes of its state.

    Of a language model also whether it is `endless`, and how many tokens `score` reads at once (None: the whole text).
    """
    from mercer.inference.score import default_context
    from mercer.models.decoder import DecoderLM

    model = opened.model
    layers = _layers(model)
    kept = [layer["state_bytes"] for layer in layers if "state_bytes" in layer]
    total = {str(n): sum(each[str(n)] for each in kept) for n in CONTEXTS} if kept and None not in kept else None
    return {
        "folder": str(opened.folder),
        "family": opened.family,
        "architecture": type(model).__name__,
        "model": model.config.model_dump(mode="json"),
        "parameters": model.parameter_count,
        "dtypes": _dtypes(model),
        "context": _context(model.config),
        **({"endless": model.endless, "scored": default_context(model)} if isinstance(model, DecoderLM) else {}),
        **_texts(opened),
        "layers": layers,
        "state_bytes": total,
    }


def _dtypes(model: nn.Module) -> dict[str, int]:
    """Parameters of each dtype, the most frequent first."""
    counts: Counter[str] = Counter()
    for parameter in model.parameters():
        counts[str(parameter.dtype).removeprefix("torch.")] += parameter.numel()
    return dict(counts.most_common())


def _context(config: Any) -> dict[str, int | None]:
    """How much the model reads at once, of each kind of input; None: its positions have no end."""
    from mercer.models.decision_config import DecisionConfig
    from mercer.models.seq2seq_config import Seq2SeqConfig
    from mercer.models.vision_config import VisionConfig

    if isinstance(config, VisionConfig):
        return {"patches": config.patches}
    if isinstance(config, DecisionConfig):
        return {"steps": config.max_length}
    if isinstance(config, Seq2SeqConfig):
        target = {"target tokens": config.reach}
        if config.source == "frames":
            return {"frames": 2 * config.max_source} | target  # the second convolution halves them
        return {"source tokens": None if config.reach is None else config.max_source} | target
    return {"tokens": getattr(config, "reach", config.max_length)}


def _texts(opened: Checkpoint) -> dict[str, Any]:
    """Whether there is a tokenizer that fits, with its number of tokens, or why not; and a template for chats."""
    from mercer.errors import MercerError

    if not hasattr(opened.model.config, "vocab_size"):
        return {"tokenizer": None, "chat": False}
    try:
        found = opened.vocabulary
    except MercerError as error:
        return {"tokenizer": None, "no_tokenizer": str(error), "chat": False}
    chats = False
    if opened.family != "mercer":
        with suppress(MercerError):  # no template, or one that does not serve
            chats = bool(opened.chat.source)
    return {"tokenizer": {"tokens": found.size, "special": len(found.special)}, "chat": chats}


def _layers(model: Any) -> list[dict[str, Any]]:
    from mercer.models.decoder import DecoderLM
    from mercer.models.encoder import Encoder
    from mercer.models.seq2seq import Seq2Seq

    config = model.config
    if isinstance(model, DecoderLM):
        return _decoder(model)
    if isinstance(model, Seq2Seq):
        encoder = [{"part": "encoder", "attention": name, "structure": "full"} for name in config.encoder.attentions]
        relative = model.decoder.relative
        blocks = zip(config.attentions, model.decoder.blocks, strict=True)
        return encoder + [
            {"part": "decoder"} | _with_state(name, "causal", block.attention, relative) for name, block in blocks
        ]
    if isinstance(model, Encoder):
        return [
            {"attention": name, "structure": _encoder_structure(config, i)} for i, name in enumerate(config.attentions)
        ]
    if hasattr(config, "patch"):
        return [{"attention": name, "structure": "full"} for name in config.attentions]
    return [
        _with_state(name, "causal", block.attention, None)
        for name, block in zip(config.attentions, model.blocks, strict=True)
    ]


def _encoder_structure(config: Any, layer: int) -> str:
    if config.longformer_windows is not None:
        return f"longformer({config.longformer_windows[layer]})"
    if config.bigbird_block is not None:
        return f"bigbird({config.bigbird_block})"
    return "full"


def _decoder(model: Any) -> list[dict[str, Any]]:
    """Layers of a language model: attentions, mixers, whose states have one size, and layers that have both."""
    import torch

    from mercer.mixers.block import MixerBlock
    from mercer.models.shared_hybrid import HybridBlock

    found: list[dict[str, Any]] = []
    carried: dict[Any, Any] = {}
    window = model.config.window
    names = zip(model.config.attentions, model.config.structures, model.blocks, strict=True)
    for layer, (name, named, block) in enumerate(names):
        within = None if window is None else f"window({window})"
        structure = named if within is None else within if named == "causal" else f"{named} & {within}"
        if isinstance(block, MixerBlock | HybridBlock):
            token = torch.zeros(1, 1, model.config.dim, dtype=model.embedding.weight.dtype)
            mixer = block if isinstance(block, MixerBlock) else block.mixer
            with torch.no_grad():
                _, state = mixer(token, carried=carried, return_state=True)
            sizes = dict.fromkeys(map(str, CONTEXTS), state.nbytes)
            own = getattr(model.config, "mixer", name)
            if isinstance(block, MixerBlock):
                found.append({"attention": own, "structure": "causal", "state": "mixer", "state_bytes": sizes})
                continue
            number = model.config.block_of(layer)
            shared = model.shared[number].attention
            names_of = model.config.pattern
            said = _with_state(f"{own} + {names_of[number % len(names_of)]}", structure, shared, model.relative)
            kept = said["state_bytes"]
            both = None if kept is None else {n: kept[n] + sizes[n] for n in sizes}
            found.append(said | {"state_bytes": both})
        else:
            found.append(_with_state(name, structure, block.attention, model.relative))
    return found


def _with_state(name: str, structure: str, attention: Any, relative: Any) -> dict[str, Any]:
    """An attention layer's names and the bytes of the state that one sequence leaves in it; None without a state."""
    import torch

    from mercer.core.cost import cache_bytes
    from mercer.core.merged import merge
    from mercer.core.support import Sizes
    from mercer.models.visibility import ending
    from mercer.ops import plan

    names = {"attention": name, "structure": structure}
    if ending(attention.structure) is not None:
        return names | {"state": None, "state_bytes": None}
    merged = merge(attention.structure)
    dtype = next(attention.parameters()).dtype
    if merged.patterns:  # a cache, whatever the kernel; a plan would lay out the tiles of every context for the same
        heads, size = (attention.heads, attention.kv_heads), attention.head_dim
        bytes_ = {
            str(n): cache_bytes(merged, Sizes(1, *heads, n, n, size, size, cache_itemsize=dtype.itemsize))
            for n in CONTEXTS
        }
        return names | {"state": "pairs", "state_bytes": bytes_}
    by_length = attention.rotary is not None and attention.rotary.by_length  # keeps keys, to turn them anew
    sizes = {}
    for context in CONTEXTS:
        q, k = (
            torch.empty(1, heads, context, attention.head_dim, dtype=dtype, device="meta")
            for heads in (attention.heads, attention.kv_heads)
        )
        chosen = plan(
            q,
            k,
            k,
            kernel=attention.kernel,
            normalizer=attention.normalizer,
            structure=attention.structure if relative is None else attention.structure & relative(),
            return_state=True,
            form=attention.form,
            path="pairs" if by_length else attention.path,
        )
        sizes[str(context)] = chosen.state_bytes
    return names | {"state": chosen.path, "state_bytes": sizes}
