"""Configurations of models on the hub with their own keys, which older programs wrote and today's may not know.

hub_configs.json has them with the sizes of tiny models.
"""

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from tests.checkpoints.measure import BOUND, error
from tests.checkpoints.zoo import frames, redraw, tokens

from mercer import checkpoints
from mercer.checkpoints.family import find_family
from mercer.checkpoints.keys import Keys
from mercer.errors import InvalidArgument, Unsupported

HUB = json.loads(Path(__file__).with_name("hub_configs.json").read_text())


def read(values):
    family = find_family(values["model_type"])
    keys = Keys(values, "config.json")
    config = family.read_config(keys, values.get("architectures", family.architectures)[0])
    keys.finish()
    return config, keys


@pytest.mark.parametrize("name", HUB)
def test_every_key_is_used_or_left_aside(name):
    config, keys = read(HUB[name])
    assert isinstance(config, find_family(HUB[name]["model_type"]).config)
    assert keys.ignored.keys() < HUB[name].keys()


@pytest.mark.parametrize(
    ("name", "keys", "sentence"),
    [
        ("SmolLM2-135M", {"rope_interleaved": True}, "rope_interleaved is True, and only False"),
        ("gemma-2-9b", {"sliding_window_size": 9}, "sliding_window_size is 9, and only 8"),
        ("bert-base-chinese", {"pruned_heads": {"0": [1]}}, "pruned_heads is .*, and only {} can be computed"),
        ("distilgpt2", {"is_encoder_decoder": True}, "is_encoder_decoder is True, and only False"),
        ("distilgpt2", {"quantization_config": {"bits": 4}}, "quantization_config is .*, and only None"),
        ("pythia-70m", {"add_cross_attention": True}, "add_cross_attention is True, and only False"),
        ("bigbird-roberta-base", {"position_embedding_type": "relative_key"}, "'relative_key', and only 'absolute'"),
        ("esm2_t6_8M_UR50D", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "esm has none"),
        ("mamba-130m", {"ssm_cfg": {"layer": "Mamba2"}}, "ssm_cfg is .*, and only {} can be computed"),
        ("mamba-130m", {"time_step_rank": "half"}, "time_step_rank is 'half', and only 'auto' or a number"),
        ("falcon-mamba-7b", {"ssm_cfg": {}}, "keys that are not known, ssm_cfg"),
        ("Mamba-Codestral-7B-v0.1", {"hidden_act": "gelu"}, "hidden_act is 'gelu', and only 'silu'"),
        ("Mamba-Codestral-7B-v0.1", {"num_heads": 4}, "4 heads of 8 channels, expand 2 of 32 and an intermediate_size"),
        ("Mamba-Codestral-7B-v0.1", {"time_step_limit": [0.1]}, r"time_step_limit is \[0.1\], not two numbers"),
        ("rwkv-4-169m-pile", {"layer_norm_epsilon": 1e-6}, "only 1e-05 can be computed; the last norm has this"),
        ("Jamba-v0.1", {"mamba_inner_layernorms": False}, "mamba_inner_layernorms is False, and only True"),
        ("Jamba-v0.1", {"mamba_dt_rank": "half"}, "mamba_dt_rank is 'half', and only 'auto' or a number"),
        ("Zamba-7B-v1", {"hidden_mamba_act": "gelu"}, "hidden_mamba_act is 'gelu', and only 'silu'"),
        ("Zamba-7B-v1", {"hidden_act": "tanh"}, "hidden_act is 'tanh'; what can be computed is 'gelu', 'silu'"),
        ("Zamba2-1.2B", {"use_long_context": True}, "use_long_context is True, and only False"),
        ("Zamba2-1.2B", {"layers_block_type": ["mamba", "hybrid"]}, "must say 'mamba' or 'hybrid' of each of 4 layers"),
        ("Zamba2-1.2B", {"attention_head_dim": 8}, "attention_head_dim is 8, and only 16"),
        ("Zamba2-1.2B", {"num_attention_heads": 5}, "5 heads do not divide twice 32 channels"),
        ("llama-7b", {"rope_parameters": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor .* is not 1.0"),
        ("llama-7b", {"rope_parameters": {"rope_theta": "1e4"}}, "rope_theta is '1e4', not of type float"),
        ("llama-7b", {"rope_theta": 1e4, "rope_parameters": {"rope_theta": 1e5}}, "rope_theta is 10000.0, and in"),
        (
            "llama-7b",
            {"rope_parameters": {"rope_type": "default"}, "rope_scaling": {"type": "linear", "factor": 2.0}},
            "rope_parameters and rope_scaling differ",
        ),
    ],
)
def test_what_they_could_ask_for_is_refused(name, keys, sentence):
    with pytest.raises((InvalidArgument, Unsupported), match=sentence):
        read(HUB[name] | keys)


def test_old_and_new_names_of_rotary_positions_agree():
    scaling = {"type": "linear", "factor": 2.0}
    new = {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}
    wanted = read(HUB["llama-7b"] | {"rope_parameters": new})[0]
    assert wanted.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    for more in ({"rope_scaling": scaling}, {"rope_parameters": new, "rope_scaling": scaling, "rope_theta": 1e4}):
        assert read(HUB["llama-7b"] | more)[0] == wanted


@pytest.mark.peers
@pytest.mark.parametrize("name", HUB)
def test_transformers_reads_the_same_model(name, tmp_path):
    import transformers

    values = HUB[name]
    listed = values.get("architectures", ["LongformerForMaskedLM"])[0]
    kind = getattr(transformers, listed.replace("T5WithLMHeadModel", "T5ForConditionalGeneration"))
    theirs = kind(kind.config_class.from_dict({**values, "torch_dtype": "float32"})).float().eval()
    if "flan" in name:  # whose scores have a matrix of their own, whatever the configuration's class says
        theirs.config.tie_word_embeddings = False
        theirs.lm_head.weight = torch.nn.Parameter(theirs.lm_head.weight.clone())
    redraw(theirs)
    theirs.save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(values))
    as_old_files_are(name, tmp_path / "model.safetensors")
    ours = checkpoints.load(tmp_path)
    ids = tokens(length=32)
    kind = values["model_type"]
    with torch.no_grad():
        if kind == "decision_transformer":
            return  # its call is compared in test_decision
        if kind == "vit":
            found, answer = ours(image := frames(2, 3, 256).view(2, 3, 16, 16)), theirs(image)
        elif kind == "whisper":
            found, answer = ours(frames(), ids), theirs(input_features=frames(), decoder_input_ids=ids)
        elif values.get("is_encoder_decoder"):
            found, answer = ours(ids, ids[:, :9]), theirs(input_ids=ids, decoder_input_ids=ids[:, :9])
        else:
            found, answer = ours(ids), theirs(ids)
    names = ("logits", "prediction_logits", "last_hidden_state")
    assert error(found, next(answer[key] for key in names if key in answer)) < BOUND


def as_old_files_are(name, path):
    """Names and tensors that only files of that time have."""
    tensors = load_file(path)
    if name == "bert-base-uncased":
        tensors = {re.sub(r"(?<=LayerNorm\.)weight", "gamma", key): tensor for key, tensor in tensors.items()}
        tensors = {re.sub(r"(?<=LayerNorm\.)bias", "beta", key): tensor for key, tensor in tensors.items()}
        tensors["cls.seq_relationship.weight"] = torch.ones(2, 32)
        tensors["bert.pooler.dense.weight"] = torch.ones(32, 32)
        tensors["bert.embeddings.position_ids"] = torch.arange(64).view(1, 64)
    elif name.startswith("esm2"):
        tensors["esm.embeddings.position_embeddings.weight"] = torch.ones(66, 32)
        tensors["esm.contact_head.regression.weight"] = torch.ones(1, 8)
    elif name == "mamba-130m":
        tensors["backbone.embedding.weight"] = tensors.pop("backbone.embeddings.weight")
    else:
        return
    save_file(tensors, path)
