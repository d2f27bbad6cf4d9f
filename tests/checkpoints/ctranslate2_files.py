"""Writes models of transformers in CTranslate2's format, as its converter lays them out."""

import json
import struct
from pathlib import Path

import torch

TYPES = {torch.float32: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.float16: 4, torch.bfloat16: 5}
START = "<|startoftranscript|>"


def whisper_variables(model, dtype=torch.float32):
    """The tensors and settings of a Whisper of transformers, by CTranslate2's names."""
    config, found = model.config, {}

    def put(name, tensor):
        found[name] = tensor.detach().to(dtype)

    def linear(name, *modules):
        put(f"{name}/weight", torch.cat([module.weight for module in modules]))
        biases = [torch.zeros(module.out_features) if module.bias is None else module.bias for module in modules]
        put(f"{name}/bias", torch.cat(biases))

    def norm(name, module):
        put(f"{name}/layer_norm/gamma", module.weight)
        put(f"{name}/layer_norm/beta", module.bias)

    for side, part in (("encoder", model.model.encoder), ("decoder", model.model.decoder)):
        put(f"{side}/position_encodings/encodings", part.embed_positions.weight)
        norm(side, part.layer_norm)
        found[f"{side}/num_heads"] = torch.tensor(config.encoder_attention_heads, dtype=torch.int16)
        for i, layer in enumerate(part.layers):
            here, own = f"{side}/layer_{i}", layer.self_attn
            linear(f"{here}/self_attention/linear_0", own.q_proj, own.k_proj, own.v_proj)
            linear(f"{here}/self_attention/linear_1", own.out_proj)
            norm(f"{here}/self_attention", layer.self_attn_layer_norm)
            linear(f"{here}/ffn/linear_0", layer.fc1)
            linear(f"{here}/ffn/linear_1", layer.fc2)
            norm(f"{here}/ffn", layer.final_layer_norm)
            if side == "decoder":
                cross = layer.encoder_attn
                linear(f"{here}/attention/linear_0", cross.q_proj)
                linear(f"{here}/attention/linear_1", cross.k_proj, cross.v_proj)
                linear(f"{here}/attention/linear_2", cross.out_proj)
                norm(f"{here}/attention", layer.encoder_attn_layer_norm)
    for i, layer in ((1, model.model.encoder.conv1), (2, model.model.encoder.conv2)):
        put(f"encoder/conv{i}/weight", layer.weight)
        put(f"encoder/conv{i}/bias", layer.bias)
    put("decoder/embeddings/weight", model.model.decoder.embed_tokens.weight)
    settings = {"activation": 3, "pre_norm": 1, "alibi": 0, "scale_embeddings": 0, "start_from_zero_embedding": 0}
    found |= {f"decoder/{name}": torch.tensor(value, dtype=torch.int8) for name, value in settings.items()}
    found["decoder/alignment_layer"] = torch.tensor(-1, dtype=torch.int16)
    return found


def _text(text):
    raw = text.encode() + b"\0"
    return struct.pack("<H", len(raw)) + raw


def written(variables, *, kind="WhisperSpec", version=6, revision=3, aliases=None):
    """The bytes of model.bin."""
    aliases = {"decoder/projection/weight": "decoder/embeddings/weight"} if aliases is None else aliases
    parts = [struct.pack("<I", version), _text(kind), struct.pack("<II", revision, len(variables))]
    for name, tensor in sorted(variables.items()):
        raw = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        parts += [_text(name), struct.pack(f"<B{tensor.dim()}I", tensor.dim(), *tensor.shape)]
        parts += [struct.pack("<BI", TYPES[tensor.dtype], len(raw)), raw]
    parts.append(struct.pack("<I", len(aliases)))
    parts += [_text(name) + _text(target) for name, target in aliases.items()]
    return b"".join(parts)


def write_whisper(model, folder: Path, dtype=torch.float32, changes=None, **options):
    """A folder of CTranslate2's. changes: tensors of the file that are others; None takes one away."""
    variables = whisper_variables(model, dtype) | (changes or {})
    variables = {name: tensor for name, tensor in variables.items() if tensor is not None}
    folder.mkdir()
    (folder / "model.bin").write_bytes(written(variables, **options))
    tokens = [f"t{i}" for i in range(model.config.vocab_size - 1)]
    (folder / "vocabulary.json").write_text(json.dumps([*tokens[:5], START, *tokens[5:]]))
    (folder / "config.json").write_text(json.dumps({"suppress_ids": [1, 2]}))
