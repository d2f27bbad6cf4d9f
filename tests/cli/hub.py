"""A folder of the hub's format with a tiny Llama that talks, as `transformers` writes it."""

from pathlib import Path
from typing import Any

import torch
from tests.models.chat_templates import CHATML
from tests.models.hub_tokenizers import byte_level, write_folder


@torch.no_grad()
def write_llama(folder: Path) -> Any:
    """Write it, and return the model of `transformers`. Its parameters are drawn anew, so that tokens depend on all."""
    from transformers import LlamaConfig, LlamaForCausalLM

    size = byte_level().get_vocab_size()
    end = byte_level().token_to_id("<|im_end|>")
    config = LlamaConfig(
        vocab_size=size + 6,  # rounded up, as many are
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=400,
        tie_word_embeddings=False,
        bos_token_id=byte_level().token_to_id("<|begin|>"),
        eos_token_id=end,
    )
    model = LlamaForCausalLM(config).eval()
    generator = torch.Generator().manual_seed(7)
    for name, parameter in model.named_parameters():
        drawn = torch.randn(parameter.shape, generator=generator) * 0.3
        parameter.copy_(1 + drawn if "norm" in name else drawn)
    model.save_pretrained(folder)
    write_folder(folder, "byte-level", chat_template=CHATML)
    return model
