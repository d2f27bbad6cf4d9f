"""Tiny models of transformers with every parameter drawn again, saved before they compute anything.

Default initialisation hides faults: norms are 1, biases 0, and scores so small that a wrong angle hardly shows.
"""

from pathlib import Path
from typing import Any

import torch

VOCABULARY = 96


def _llama_like(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 128,
        "bos_token_id": 0,
        "eos_token_id": 1,
        "pad_token_id": 2,
    } | changes


def _gpt2_like(**changes: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128} | changes


def _mamba_like(**changes: Any) -> dict[str, Any]:
    return {"vocab_size": VOCABULARY, "hidden_size": 32, "num_hidden_layers": 3, "state_size": 8} | changes


def _mamba2_like(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "num_hidden_layers": 2,
        "state_size": 8,
        "num_heads": 8,
        "head_dim": 8,
        "n_groups": 1,
        "chunk_size": 16,
    } | changes


def _jamba_like(**changes: Any) -> dict[str, Any]:
    shapes = {"num_key_value_heads": 2, "num_experts": 4, "mamba_d_state": 8, "num_hidden_layers": 4}
    return _llama_like(**(shapes | {"attn_layer_period": 3, "attn_layer_offset": 1} | changes))


def _zamba_like(**changes: Any) -> dict[str, Any]:
    shapes = {"num_key_value_heads": 4, "mamba_d_state": 8, "num_hidden_layers": 3}
    return _llama_like(**(shapes | {"layers_block_type": ["mamba", "hybrid", "hybrid"]} | changes))


def _zamba2_like(**changes: Any) -> dict[str, Any]:
    shapes = {"mamba_d_state": 8, "n_mamba_heads": 8, "chunk_size": 16, "time_step_min": 0.02}
    kinds = changes.pop("layers", ["mamba", "hybrid", "hybrid"])
    return _llama_like(**shapes, layers_block_type=kinds, num_hidden_layers=len(kinds), **changes)


_YARN = {"rope_type": "yarn", "factor": 4.0, "rope_theta": 10000.0, "original_max_position_embeddings": 32}
_LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
    "rope_theta": 500000.0,
}

_RWKV = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "num_hidden_layers": 3,
    "rescale_every": 0,  # otherwise the reference halves its weights when it first computes, and its hidden states
    "use_cache": False,
}

DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2": ("GPT2LMHeadModel", _gpt2_like()),
    "llama": ("LlamaForCausalLM", _llama_like(num_key_value_heads=2)),
    "llama, tied, biased": (
        "LlamaForCausalLM",
        _llama_like(num_key_value_heads=1, attention_bias=True, mlp_bias=True, tie_word_embeddings=True, head_dim=12),
    ),
    "llama 3": ("LlamaForCausalLM", _llama_like(num_key_value_heads=2, rope_parameters=_LLAMA3)),
    "llama, yarn": ("LlamaForCausalLM", _llama_like(rope_parameters=_YARN)),
    "mistral": ("MistralForCausalLM", _llama_like(num_key_value_heads=2, sliding_window=8)),
    "mixtral": (
        "MixtralForCausalLM",
        _llama_like(num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, sliding_window=8),
    ),
    "gemma": ("GemmaForCausalLM", _llama_like(num_key_value_heads=1, head_dim=16)),
    "gemma2": (
        "Gemma2ForCausalLM",
        _llama_like(
            num_key_value_heads=2, head_dim=16, sliding_window=8, query_pre_attn_scalar=24, num_hidden_layers=3
        ),
    ),
    "gemma2, small caps": (
        "Gemma2ForCausalLM",
        _llama_like(head_dim=8, sliding_window=4, attn_logit_softcapping=2.0, final_logit_softcapping=3.0),
    ),
    "recurrent_gemma": (
        "RecurrentGemmaForCausalLM",
        _llama_like(num_key_value_heads=1, num_hidden_layers=4, attention_window_size=8),
    ),
    "recurrent_gemma, other widths": (
        "RecurrentGemmaForCausalLM",
        _llama_like(
            lru_width=48,
            conv1d_width=3,
            num_hidden_layers=3,
            attention_window_size=4,
            block_types=["attention", "recurrent"],
            attention_bias=True,
            logits_soft_cap=2.0,
        ),
    ),
    "bloom": ("BloomForCausalLM", {"vocab_size": VOCABULARY, "hidden_size": 48, "n_layer": 2, "n_head": 6}),
    "gptj": ("GPTJForCausalLM", _gpt2_like(rotary_dim=4)),
    "gpt_neox": ("GPTNeoXForCausalLM", _llama_like()),
    "gpt_neox, in sequence": ("GPTNeoXForCausalLM", _llama_like(use_parallel_residual=False, attention_bias=False)),
    "rwkv": ("RwkvForCausalLM", _RWKV),
    "rwkv, wide": ("RwkvForCausalLM", _RWKV | {"attention_hidden_size": 48, "intermediate_size": 80}),
    "mamba": ("MambaForCausalLM", _mamba_like()),
    "mamba, biased": (
        "MambaForCausalLM",
        _mamba_like(
            expand=3, time_step_rank=5, conv_kernel=3, use_bias=True, use_conv_bias=False, tie_word_embeddings=False
        ),
    ),
    "falcon_mamba": ("FalconMambaForCausalLM", _mamba_like(mixer_rms_eps=1e-3, tie_word_embeddings=False)),
    "mamba2": ("Mamba2ForCausalLM", _mamba2_like()),
    "mamba2, groups": (
        "Mamba2ForCausalLM",
        _mamba2_like(
            n_groups=2, use_bias=True, use_conv_bias=False, tie_word_embeddings=True, time_step_limit=[0.02, 0.5]
        ),
    ),
    "jamba": ("JambaForCausalLM", _jamba_like()),
    "jamba, without experts": (
        "JambaForCausalLM",
        _jamba_like(num_hidden_layers=3, num_experts=1, mamba_dt_rank=3, mamba_proj_bias=True, mamba_conv_bias=False),
    ),
    "zamba": ("ZambaForCausalLM", _zamba_like()),
    "zamba, biased": (
        "ZambaForCausalLM",
        _zamba_like(
            layers_block_type=["hybrid", "mamba", "hybrid"], n_mamba_heads=4, mamba_proj_bias=True, mamba_dt_rank=3
        ),
    ),
    "zamba2": (
        "Zamba2ForCausalLM",
        _zamba2_like(
            layers=["hybrid", "hybrid", "mamba", "hybrid"],
            num_mem_blocks=2,
            use_mem_rope=True,
            use_shared_attention_adapter=True,
            adapter_rank=4,
        ),
    ),
    "zamba2, one block": (
        "Zamba2ForCausalLM",
        _zamba2_like(add_bias_linear=True, hidden_act="silu", mamba_ngroups=2),
    ),
}
"""Decoder language models: of each name the class and its configuration."""

ENCODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "bert": ("BertForMaskedLM", _llama_like()),
    "bert, bare": ("BertModel", _llama_like(hidden_act="gelu_new", layer_norm_eps=1e-5)),
    "bert, classes": ("BertForSequenceClassification", _llama_like(num_labels=3)),
    "big_bird": ("BigBirdForMaskedLM", _llama_like(block_size=4, num_random_blocks=1)),
    "big_bird, full": ("BigBirdForMaskedLM", _llama_like(block_size=16, rescale_embeddings=True)),
    "longformer": ("LongformerForMaskedLM", _llama_like(attention_window=[4, 8], max_position_embeddings=131)),
    "esm": ("EsmForMaskedLM", _llama_like(position_embedding_type="rotary", mask_token_id=3)),
    "esm, absolute": (
        "EsmForMaskedLM",
        _llama_like(mask_token_id=3, emb_layer_norm_before=True, layer_norm_eps=1e-5),
    ),
    "esm, masked": (
        "EsmForMaskedLM",
        _llama_like(position_embedding_type="rotary", mask_token_id=7, token_dropout=True),
    ),
}
"""Encoders of tokens: of each name the class and its configuration."""


def _marian_like(**changes: Any) -> dict[str, Any]:
    sides = {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 64))}
    return (
        sides
        | {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "encoder_attention_heads": 4,
            "decoder_attention_heads": 4,
            "pad_token_id": 2,
            "bos_token_id": 0,
            "eos_token_id": 1,
            "decoder_start_token_id": 2,
        }
        | changes
    )


def _t5_like(**changes: Any) -> dict[str, Any]:
    return {
        "vocab_size": VOCABULARY,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 64,
        "num_layers": 2,
        "num_heads": 4,
        "decoder_start_token_id": 0,
    } | changes


_SWITCH = {"num_decoder_layers": 2, "num_experts": 4, "num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1}

SEQ2SEQ: dict[str, tuple[str, dict[str, Any]]] = {
    "marian": ("MarianMTModel", _marian_like(max_position_embeddings=128)),
    "marian, scaled": (
        "MarianMTModel",
        _marian_like(max_position_embeddings=128, scale_embedding=True, activation_function="swish", decoder_layers=1),
    ),
    "t5": ("T5ForConditionalGeneration", _t5_like()),
    "t5 1.1": (
        "T5ForConditionalGeneration",
        _t5_like(feed_forward_proj="gated-gelu", tie_word_embeddings=False, num_decoder_layers=3),
    ),
    "switch_transformers": ("SwitchTransformersForConditionalGeneration", _t5_like(**_SWITCH)),
    "switch_transformers, full": (
        "SwitchTransformersForConditionalGeneration",
        _t5_like(**_SWITCH | {"expert_capacity": 3}),
    ),
    "whisper": (
        "WhisperForConditionalGeneration",
        _marian_like(num_mel_bins=8, max_source_positions=32, max_target_positions=64),
    ),
}
"""Encoder-decoders: of each name the class and its configuration."""


SPREADS = {"t5": 0.15, "switch_transformers": 0.15, "jamba": 0.2, "zamba": 0.15, "zamba2": 0.1}
"""Standard deviations below 0.3: where scores are not divided by sqrt(d), and where several layers follow each other
without a residual or between norms, which multiplies the roundings of both libraries."""


def redraw(model: torch.nn.Module, seed: int = 0) -> None:
    """Matrices N(0, 0.3^2), or as SPREADS says; vectors (biases, norms) moved by
    N(0, 0.1^2). What is fixed, such as tables of sinusoids that are not saved, stays.
    """
    spread = SPREADS.get(model.config.model_type, 0.3)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if not parameter.requires_grad:
                continue
            drawn = torch.randn(parameter.shape, generator=generator)
            if parameter.dim() > 1:
                parameter.copy_(drawn * spread)
            else:
                parameter.add_(drawn * 0.1)
    model.tie_weights()


def make(kind: str, settings: dict[str, Any], folder: Path, **options: Any) -> torch.nn.Module:
    """A model of transformers, redrawn, saved into the folder, in evaluation mode."""
    import transformers

    kind_of_config = getattr(transformers, kind).config_class
    model = getattr(transformers, kind)(kind_of_config(**settings)).eval()
    redraw(model)
    if kind.startswith("T5") and settings.get("tie_word_embeddings") is False:
        # As transformers 5 reads T5 1.1 from the hub: with a head of its own, in a configuration that says "tied".
        drawn = torch.randn(model.lm_head.weight.shape, generator=torch.Generator().manual_seed(1))
        model.lm_head.weight = torch.nn.Parameter(drawn * 0.15)
    model.save_pretrained(folder, **options)
    return model


def frames(rows: int = 2, bins: int = 8, length: int = 64) -> torch.Tensor:
    """Frames of a spectrogram."""
    return torch.randn(rows, bins, length, generator=torch.Generator().manual_seed(3))


def tokens(rows: int = 2, length: int = 37, seed: int = 1) -> torch.Tensor:
    """Token ids that are none of the special ones."""
    return torch.randint(4, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))
