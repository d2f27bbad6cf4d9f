"""`mercer info` of every kind of model that can be read, beside what transformers says of it."""

import json
from typing import Any

import pytest
import torch
from tests.checkpoints.ctranslate2_files import write_whisper
from tests.checkpoints.test_decision import MODELS as DECISIONS
from tests.checkpoints.test_vision import MODELS as PICTURES
from tests.checkpoints.zoo import DECODERS, ENCODERS, SEQ2SEQ, make, tokens
from tests.models.hub_tokenizers import write_folder
from typer.testing import CliRunner

from mercer import checkpoints
from mercer.cli.main import app
from mercer.mixers.names import mixer_names
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.io import save_model
from mercer.models.shared_hybrid import SharedHybridLM
from mercer.models.shared_hybrid_config import SharedHybridConfig

pytestmark = pytest.mark.peers

KINDS = ("gpt2", "mistral", "gemma2", "bloom", "bert", "big_bird", "longformer", "esm", "marian", "t5", "whisper")
MODELS: dict[str, tuple[str, dict[str, Any]]] = {name: (DECODERS | ENCODERS | SEQ2SEQ)[name] for name in KINDS} | {
    "vit": PICTURES["oblong"],
    "decision_transformer": ("DecisionTransformerModel", DECISIONS["bounded"]),
}
CONTEXTS = {
    "gpt2": {"tokens": 128},
    "bloom": {"tokens": None},
    "bert": {"tokens": 128},
    "longformer": {"tokens": 128},  # of 131 rows the first three are not used
    "marian": {"source tokens": 128, "target tokens": 128},
    "t5": {"source tokens": None, "target tokens": None},
    "whisper": {"frames": 64, "target tokens": 64},
    "vit": {"patches": 16},
    "decision_transformer": {"steps": 64},
}
ATTENTIONS = {"gemma2": "softcap50-sum", "t5": "softmax", "bert": "softmax"}
STRUCTURES = {
    "mistral": ["window(8)"] * 2,
    "gemma2": ["window(8)", "causal", "window(8)"],
    "longformer": ["longformer(4)", "longformer(8)"],
    "big_bird": ["bigbird(4)"] * 2,
    "bert": ["full"] * 2,
}


def info(*arguments: object) -> dict[str, Any]:
    result = CliRunner().invoke(app, ["info", *map(str, arguments), "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.mark.parametrize("name", MODELS)
def test_every_model_is_described(name, tmp_path):
    theirs = make(*MODELS[name], tmp_path)
    facts = info(tmp_path)
    ours = checkpoints.load(tmp_path)
    assert facts["family"] == theirs.config.model_type
    assert facts["architecture"] == type(ours).__name__
    assert facts["dtypes"] == {"float32": facts["parameters"]}
    if name != "marian":  # whose tables of sinusoids are parameters there
        assert (
            abs(facts["parameters"] - sum(p.numel() for p in theirs.parameters())) <= 2 * 32 * 33
        )  # a pooler that is not used
    sides = [ours.config.encoder.attentions, ours.config.attentions] if name in SEQ2SEQ else [ours.config.attentions]
    assert [layer["attention"] for layer in facts["layers"]] == [one for side in sides for one in side]
    for kind in ATTENTIONS.keys() & {name}:
        assert {layer["attention"] for layer in facts["layers"]} == {ATTENTIONS[kind]}
    assert facts["context"] == CONTEXTS.get(name, facts["context"])
    assert [layer["structure"] for layer in facts["layers"]] == STRUCTURES.get(
        name, [layer["structure"] for layer in facts["layers"]]
    )
    assert (facts["tokenizer"], facts["chat"]) == (None, False)
    printed = CliRunner().invoke(app, ["info", str(tmp_path)])
    assert printed.exit_code == 0, printed.output
    first, second = printed.stdout.splitlines()[:2]
    assert first == f"{tmp_path}: {facts['family']}, {facts['parameters']:,} parameters"
    assert second.startswith(f"{facts['architecture']} in float32; context: ")
    assert ("no tokenizer (" in second) == hasattr(ours.config, "vocab_size")


def test_the_states_of_an_encoder_decoder_are_those_of_its_decoder(tmp_path):
    make(*SEQ2SEQ["marian"], tmp_path)
    facts, model = info(tmp_path), checkpoints.load(tmp_path)
    decoder = model.conditioned(tokens(length=11))
    with torch.no_grad():
        _, states = decoder(tokens(rows=2, length=100)[:, :100], return_states=True)
    (own,) = {state.keys.nbytes + state.values.nbytes for state in states[: model.config.layers]}
    found = [layer.get("state_bytes") for layer in facts["layers"]]
    assert found[:2] == [None, None]
    assert [layer["256"] * 2 * 100 for layer in found[2:]] == [own * 256] * 2
    assert facts["state_bytes"]["256"] == 2 * found[2]["256"]


def test_dtypes_and_tokenizers_are_told(tmp_path):
    make(*DECODERS["llama"], tmp_path / "model")
    model = checkpoints.load(tmp_path / "model", dtype="bfloat16")
    for name, parameter in model.named_parameters():
        if "norm" in name:
            parameter.data = parameter.data.float()
    checkpoints.save(model, tmp_path / "half", family="llama")
    facts = info(tmp_path / "half")
    norms = 5 * 32
    assert facts["dtypes"] == {"bfloat16": facts["parameters"] - norms, "float32": norms}
    assert facts["layers"][0]["state_bytes"]["256"] == 2 * 2 * 8 * 256 * 2  # keys and values, heads, channels, bytes
    assert "no_tokenizer" in facts
    vocabulary = write_folder(tmp_path / "words", "words", chat_template="{{ messages }}")
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / "half" / file).write_text((vocabulary / file).read_text())
    facts = info(tmp_path / "half")
    assert "no_tokenizer" not in facts
    assert facts["tokenizer"]["tokens"] == checkpoints.open_checkpoint(tmp_path / "half").vocabulary.size
    assert facts["chat"]
    shown = CliRunner().invoke(app, ["info", str(tmp_path / "half")]).stdout.splitlines()[1]
    assert shown == (
        f"DecoderLM in bfloat16, float32 (160 parameters); context: 128 tokens; tokenizer: "
        f"{facts['tokenizer']['tokens']} tokens; with a chat template"
    )


def test_other_formats_are_described(tmp_path):
    whisper = make(*SEQ2SEQ["whisper"], tmp_path / "hub")
    write_whisper(whisper, tmp_path / "converted", torch.float16)
    facts = info(tmp_path / "converted")
    assert (facts["family"], facts["context"]) == ("whisper", {"frames": 64, "target tokens": 64})
    assert set(facts["dtypes"]) == {"float16"}
    gguf_files = pytest.importorskip("tests.checkpoints.gguf_files", reason="the extra gguf is not installed")
    gguf_files.write_llama(make(*DECODERS["llama"], tmp_path / "llama"), tmp_path / "a.gguf")
    facts = info(tmp_path / "a.gguf")
    assert (facts["family"], facts["context"]) == ("llama", {"tokens": 128})


@pytest.mark.parametrize("name", mixer_names()[:2])
def test_the_state_of_a_mixer_has_one_size(name, tmp_path):
    model = DecoderLM(
        ModelConfig(vocab_size=256, dim=32, layers=2, heads=2, attention=[name, "softmax"], position="none")
    )
    save_model(model, tmp_path)
    facts = info(tmp_path)
    assert [layer["state"] for layer in facts["layers"]] == ["mixer", "pairs"]
    with torch.no_grad():
        _, states = model(torch.zeros(1, 7, dtype=torch.int64), return_states=True)
    assert set(facts["layers"][0]["state_bytes"].values()) == {states[0].nbytes}
    assert facts["tokenizer"] == {"tokens": 256, "special": 0}


@pytest.mark.parametrize(
    ("fields", "context", "endless", "scored", "said"),
    [
        ({"attention": "mamba"}, None, True, None, "any number of tokens in states of bounded size, so that a text is"),
        ({"attention": "elu-sum", "position": "none"}, None, True, None, "any number of tokens in states of bounded"),
        (
            {"attention": "mamba,softmax", "position": "none"}, None, False, 96,
            "any number of tokens in states that grow with them; a text is scored by windows of 96;",
        ),
        ({"attention": "mamba,softmax", "window": 8}, 96, False, 96, "96 tokens;"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 4.0}}, 384, False, 384, "384 tokens;"),
        ({"allow_longer": True}, None, False, 96, "any number of tokens in states that grow"),
        ({"attention": "elu-sum", "allow_longer": True}, None, False, 96, "any number of tokens; a text is scored by"),
    ],
)  # fmt: skip
def test_the_limit_of_a_text_is_told(fields, context, endless, scored, said, tmp_path):
    save_model(DecoderLM(ModelConfig(vocab_size=256, dim=32, layers=2, heads=2, max_length=96, **fields)), tmp_path)
    facts = info(tmp_path)
    assert (facts["context"], facts["endless"], facts["scored"]) == ({"tokens": context}, endless, scored)
    assert f"context: {said}" in CliRunner().invoke(app, ["info", str(tmp_path)]).stdout.splitlines()[1]


def test_layers_that_share_a_block_have_both_states(tmp_path):
    shapes = {"dim": 32, "heads": 4, "layers": 3, "shared_at": (0, 2), "mixers": {"mamba2": {"head_dim": 8}}}
    save_model(SharedHybridLM(SharedHybridConfig(vocab_size=256, **shapes)), tmp_path)
    layers = info(tmp_path)["layers"]
    assert [layer["attention"] for layer in layers] == ["mamba2 + softmax", "mamba2", "mamba2 + softmax"]
    plain, joined = layers[1]["state_bytes"], layers[0]["state_bytes"]
    assert len(set(plain.values())) == 1
    keys_and_values = {n: joined[n] - plain[n] for n in joined}
    assert keys_and_values["1024"] == 1024 * 2 * 64 * 4  # keys and values of 2 dim channels, in float32
