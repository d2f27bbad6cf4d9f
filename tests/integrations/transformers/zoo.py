"""Small models of transformers, every parameter drawn again, since default initialisation hides faults."""

import torch
import transformers
from torch import Tensor

VOCABULARY = 96
_DECODER = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
_GPT2 = {"vocab_size": VOCABULARY, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128}
_SEQ2SEQ = {
    "vocab_size": VOCABULARY,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "max_position_embeddings": 128,
    "pad_token_id": 2,
    "decoder_start_token_id": 2,
    "eos_token_id": 1,
    "bos_token_id": 0,
}
_KINDS = {
    "gpt2": ("GPT2LMHeadModel", "GPT2Config", _GPT2 | {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}),
    "llama": ("LlamaForCausalLM", "LlamaConfig", _DECODER | {"num_key_value_heads": 2}),
    "mistral": ("MistralForCausalLM", "MistralConfig", _DECODER | {"num_key_value_heads": 2, "sliding_window": 8}),
    "gemma": ("GemmaForCausalLM", "GemmaConfig", _DECODER | {"num_key_value_heads": 1, "head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", "Gemma2Config", _DECODER | {"num_key_value_heads": 2, "sliding_window": 8}),
    "gemma3": (
        "Gemma3ForCausalLM",
        "Gemma3TextConfig",
        _DECODER
        | {
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 8,
            "layer_types": ["sliding_attention", "full_attention"],
        },
    ),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXConfig", _DECODER),
    "gpt_oss": (
        "GptOssForCausalLM",
        "GptOssConfig",
        _DECODER | {"num_key_value_heads": 2, "head_dim": 8, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "bloom": (
        "BloomForCausalLM",
        "BloomConfig",
        {"vocab_size": VOCABULARY, "hidden_size": 32, "n_layer": 2, "n_head": 4},
    ),
    "bert": ("BertForMaskedLM", "BertConfig", _DECODER),
    "vit": (
        "ViTForImageClassification",
        "ViTConfig",
        {
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "image_size": 16,
            "patch_size": 4,
        },
    ),
    "marian": ("MarianMTModel", "MarianConfig", _SEQ2SEQ),
    "t5": (
        "T5ForConditionalGeneration",
        "T5Config",
        {
            "vocab_size": VOCABULARY,
            "d_model": 32,
            "d_kv": 8,
            "d_ff": 48,
            "num_layers": 2,
            "num_heads": 4,
            "decoder_start_token_id": 0,
        },
    ),
}


def make(kind: str, **settings: object) -> transformers.PreTrainedModel:
    """A model in evaluation mode, the same weights at every call."""
    model_class, config_class, values = _KINDS[kind]
    model = getattr(transformers, model_class)(getattr(transformers, config_class)(**(values | settings)))
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.3 * noise if parameter.dim() > 1 else parameter + 0.1 * noise)
    model.tie_weights()
    if model.can_generate():
        model.generation_config.eos_token_id = None  # so that every generation has the length that was asked for
    return model.eval()


def tokens(rows: int, length: int, seed: int = 1) -> Tensor:
    """Token ids without the special ones."""
    return torch.randint(4, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(seed))


def padded(lengths: list[int], width: int, side: str) -> Tensor:
    """The attention mask of rows with so many tokens, padded on a side."""
    places = torch.arange(width)
    counts = torch.tensor(lengths).unsqueeze(1)
    return (places < counts if side == "right" else places >= width - counts).long()


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    """Equal to 1e-5 of the largest number, or to 1e-5 where all are small: what float32 leaves of two ways to add."""
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * max(1.0, theirs.abs().max().item()))
