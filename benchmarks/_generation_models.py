"""One model of random weights in the formats that the contestants of `generation_speed` read.

The shape is SmolLM2-135M's. Weights are written by transformers' `save_pretrained`, so that nobody's own saving is in
between; the other formats are made from that folder, by the tools that the contestants bring.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

SHAPES = {
    "smollm2-135m": (49_152, 576, 30, 9, 3, 1536),
    "tiny": (2_048, 64, 2, 4, 2, 128),
}
"""Vocabulary, channels, layers, heads, key heads, channels inside."""
LENGTH = 8_192


def hub_folder(root: Path, shape: str, dtype: str) -> Path:
    """A folder of transformers with the weights rounded to `dtype`, made if absent."""
    folder = root / f"{shape}-{dtype}"
    if (folder / "config.json").exists():
        return folder
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    vocabulary, dim, layers, heads, key_heads, hidden = SHAPES[shape]
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=dim,
        intermediate_size=hidden,
        num_hidden_layers=layers,
        num_attention_heads=heads,
        num_key_value_heads=key_heads,
        max_position_embeddings=LENGTH,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 1e5},
        tie_word_embeddings=True,
        bos_token_id=0,
        eos_token_id=0,
        initializer_range=0.05,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16)  # both dtypes hold the same numbers
    model.to(getattr(torch, dtype)).save_pretrained(folder)
    pieces = {piece: i for i, piece in enumerate(_pieces(vocabulary))}
    tokenizer = Tokenizer(models.BPE(vocab=pieces, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token=_END, eos_token=_END).save_pretrained(folder)
    return folder


_END = "<|endoftext|>"


def _pieces(count: int) -> list[str]:
    """The end, the bytes as byte-level BPE writes them, and names for the rest."""
    printable = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAC + 1), *range(0xAE, 0xFF + 1)]
    letters = [chr(c) for c in printable] + [chr(256 + i) for i in range(256 - len(printable))]
    return [_END, *letters, *(f"<{i}>" for i in range(count - 257))]


def ctranslate2_folder(root: Path, shape: str, dtype: str) -> Path:
    """A folder of CTranslate2, made if absent."""
    folder = root / f"{shape}-ctranslate2-{dtype}"
    if not (folder / "model.bin").exists():
        converters = importlib.import_module("ctranslate2").converters
        source = hub_folder(root, shape, "bfloat16" if dtype == "bfloat16" else "float32")
        converters.TransformersConverter(str(source)).convert(str(folder), quantization=dtype)
    return folder


def onnx_folder(root: Path, shape: str, dtype: str) -> Path:
    """A folder of ONNX Runtime GenAI, made by its model builder if absent."""
    folder = root / f"{shape}-onnx-{dtype}"
    if not (folder / "genai_config.json").exists():
        precision = {"float32": "fp32", "int4": "int4"}[dtype]
        source = hub_folder(root, shape, "float32")
        command = [sys.executable, "-m", "onnxruntime_genai.models.builder", "-i", str(source), "-o", str(folder)]
        command += ["-p", precision, "-e", "cpu", "-c", str(root / "cache")]
        done = subprocess.run(command, check=False, capture_output=True, text=True)
        if done.returncode:
            raise ImportError(f"its model builder failed: {(done.stderr.strip() or '?').splitlines()[-1]}")
    return folder


def gguf_file(root: Path, shape: str, dtype: str) -> Path:
    """A GGUF file, made by the package `gguf` if absent. Queries and keys have their channels in pairs there."""
    file = root / f"{shape}-{dtype}.gguf"
    if file.exists():
        return file
    gguf = importlib.import_module("gguf")
    from safetensors.torch import load_file

    folder = hub_folder(root, shape, "float32")
    tensors, config = load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text())
    dim, heads, key_heads = (config[k] for k in ("hidden_size", "num_attention_heads", "num_key_value_heads"))
    temporary = file.with_suffix(".part")
    writer = gguf.GGUFWriter(temporary, "llama")
    numbers: list[tuple[Callable[[Any], None], Any]] = [
        (writer.add_context_length, LENGTH),
        (writer.add_embedding_length, dim),
        (writer.add_block_count, config["num_hidden_layers"]),
        (writer.add_feed_forward_length, config["intermediate_size"]),
        (writer.add_head_count, heads),
        (writer.add_head_count_kv, key_heads),
        (writer.add_layer_norm_rms_eps, config["rms_norm_eps"]),
        (writer.add_rope_freq_base, 1e5),
        (writer.add_rope_dimension_count, dim // heads),
        (writer.add_vocab_size, config["vocab_size"]),
        (writer.add_file_type, {"float32": 0, "bfloat16": 32, "int8": 7, "int4": 2}[dtype]),
        (writer.add_tokenizer_model, "gpt2"),
        (writer.add_tokenizer_pre, "gpt-2"),
        (writer.add_token_list, _pieces(config["vocab_size"])),
        (writer.add_token_types, [3] + [1] * (config["vocab_size"] - 1)),
        (writer.add_token_merges, ["a b"]),
        (writer.add_bos_token_id, 0),
        (writer.add_eos_token_id, 0),
    ]
    for call, value in numbers:
        call(value)
    kind = {"float32": "F32", "bfloat16": "BF16", "int8": "Q8_0", "int4": "Q4_0"}[dtype]
    kinds = gguf.GGMLQuantizationType
    for name, tensor in tensors.items():
        for long, short in _NAMES.items():
            name = name.replace(long, short)
        for part, count in (("attn_q.", heads), ("attn_k.", key_heads)):
            if part in name:
                tensor = tensor.view(count, 2, -1, dim).transpose(1, 2).reshape(-1, dim)
        chosen = kinds[kind] if tensor.ndim == 2 else kinds.F32
        if name == "token_embd.weight" and dtype == "int4":
            chosen = kinds.Q8_0  # as in our own, and in the files that are about
        writer.add_tensor(name, gguf.quants.quantize(tensor.float().numpy(), chosen), raw_dtype=chosen)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    temporary.rename(file)
    return file


_NAMES = {
    "model.layers.": "blk.",
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}
