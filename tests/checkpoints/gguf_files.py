"""GGUF files of tiny models, written by the package of the format's authors."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter
from torch import nn

KINDS = {name: getattr(GGMLQuantizationType, name) for name in ("F32", "F16", "BF16", "Q8_0", "Q4_0", "Q4_1", "Q5_1")}
LLAMA = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def interleaved(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Rows of queries or keys as the format has them: pairs of channels (i, i + d/2) side by side."""
    d = weight.shape[0] // heads
    order = [head * d + i + half * d // 2 for head in range(heads) for i in range(d // 2) for half in range(2)]
    return weight[order]


def write_llama(model: Any, path: Path, kind: str = "F32", more: dict[str, Any] | None = None) -> None:
    """A Llama of transformers with all matrices in one kind."""
    config = model.config
    writer = GGUFWriter(path, "llama")
    writer.add_block_count(config.num_hidden_layers)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_rope_freq_base(config.rope_parameters["rope_theta"])
    writer.add_vocab_size(config.vocab_size)
    for key, value in (more or {}).items():
        add(writer, key, value)
    for name, tensor in model.state_dict().items():
        body, _, _ = name.rpartition(".weight")
        if body.startswith("model.layers."):
            _, _, layer, part = body.split(".", 3)
            there = f"blk.{layer}.{LLAMA[part]}.weight"
        else:
            there = f"{LLAMA[body]}.weight"
        if "q_proj" in name or "k_proj" in name:
            heads = config.num_attention_heads if "q_proj" in name else config.num_key_value_heads
            tensor = interleaved(tensor, heads)
        add_tensor(writer, there, tensor, kind if tensor.dim() > 1 else "F32")
    finish(writer)


def add(writer: GGUFWriter, key: str, value: Any) -> None:
    """One key of the metadata, by the type of its value."""
    if isinstance(value, bool):
        writer.add_bool(key, value)
    elif isinstance(value, int):
        writer.add_uint32(key, value)
    elif isinstance(value, float):
        writer.add_float32(key, value)
    elif isinstance(value, str):
        writer.add_string(key, value)
    else:
        writer.add_array(key, value)


def add_tensor(writer: GGUFWriter, name: str, tensor: torch.Tensor, kind: str) -> None:
    data = tensor.detach().float().numpy()
    if kind in ("F32", "F16"):
        writer.add_tensor(name, data.astype(np.float32 if kind == "F32" else np.float16))
    else:
        writer.add_tensor(name, gguf.quantize(data, KINDS[kind]), raw_dtype=KINDS[kind])


def finish(writer: GGUFWriter) -> None:
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def rounded(model: nn.Module, kind: str) -> None:
    """Give a model's matrices the values that a kind of quantisation leaves of them."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                data = gguf.dequantize(gguf.quantize(parameter.numpy(), KINDS[kind]), KINDS[kind])
                parameter.copy_(torch.from_numpy(data.reshape(parameter.shape)))
