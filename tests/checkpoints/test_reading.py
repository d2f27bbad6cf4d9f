"""What is refused, what is left aside, and what reading costs."""

import json
import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file

from mercer import checkpoints
from mercer.checkpoints.family import family_of, find_family
from mercer.errors import InvalidArgument, StorageError, Unsupported
from mercer.models.config import ModelConfig
from mercer.models.decoder import DecoderLM
from mercer.models.encoder import Encoder
from mercer.models.encoder_config import EncoderConfig
from mercer.models.io import save_model

CONFIG = ModelConfig(
    vocab_size=50, dim=32, layers=2, heads=4, kv_heads=2, hidden=48, tie_embeddings=False, max_length=64, seed=3
)
TOKENS = torch.tensor([[3, 4, 5, 6, 7, 8]])


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """A model, and the folder of the hub's format that it was written to."""
    model = DecoderLM(CONFIG)
    folder = tmp_path_factory.mktemp("saved") / "model"
    checkpoints.save(model, folder, family="llama")
    return model, folder


@pytest.fixture
def folder(saved, tmp_path):
    """A copy to be changed."""
    return shutil.copytree(saved[1], tmp_path / "model")


def change(folder, **keys):
    values = json.loads((folder / "config.json").read_text())
    for key, value in keys.items():
        if value is ...:
            del values[key]
        else:
            values[key] = value
    (folder / "config.json").write_text(json.dumps(values))


def rewrite(folder, edit):
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def test_what_is_written_is_read(saved):
    model, folder = saved
    again = checkpoints.load(folder)
    assert again.config.model_dump(exclude={"seed", "init_std", "head_dim"}) == CONFIG.model_dump(
        exclude={"seed", "init_std", "head_dim"}
    )
    assert again.config.head_size == CONFIG.head_size
    for name, tensor in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], tensor), name
    assert not again.training
    assert torch.equal(again(TOKENS), model.eval()(TOKENS))


@pytest.mark.parametrize("limit", [1, 5_000, 20_000])
def test_shards(saved, tmp_path, limit):
    model, _ = saved
    checkpoints.save(model, tmp_path / "shards", family="llama", shard_bytes=limit)
    files = sorted(path.name for path in (tmp_path / "shards").iterdir())
    assert "model.safetensors.index.json" in files
    assert len(files) > 3
    again = checkpoints.load(tmp_path / "shards")
    assert all(torch.equal(a, b) for a, b in zip(again.parameters(), model.parameters(), strict=True))


@pytest.mark.parametrize(
    ("keys", "sentence"),
    [
        ({"rope_theta_2": 1.0}, "keys that are not known, rope_theta_2 = 1.0"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu', and only 'silu' can be computed"),
        ({"model_type": "llama5"}, "no architecture 'llama5' here; there are gpt2"),
        ({"model_type": ...}, "has no model_type"),
        ({"architectures": ["LlamaForTokenClassification"]}, "of llama there are LlamaForCausalLM"),
        ({"hidden_size": ...}, "lacks hidden_size"),
        ({"hidden_size": "32"}, "hidden_size is '32', not of type int"),
        ({"hidden_size": True}, "hidden_size is True, not of type int"),
        ({"hidden_size": 40, "head_dim": None}, "has shape"),
        ({"num_hidden_layers": 3}, "lacks model.layers.2.input_layernorm.weight"),
        ({"num_hidden_layers": 1}, "has the unknown model.layers.1.input_layernorm.weight"),
        ({"tie_word_embeddings": True}, "lm_head.weight differs from model.embed_tokens.weight"),
        ({"num_key_value_heads": 3}, "kv_heads 3 does not divide heads 4"),
        ({"model_type": ["llama"]}, r"no architecture \['llama'\] here"),
        ({"hidden_size": 10**30}, "hidden_size is 10{30}, more than any model has"),
        ({"hidden_size": 2**39, "intermediate_size": 2**39}, "no tensor has the sizes of its configuration"),
        ({"num_hidden_layers": 9999}, "it has 21 tensors for 9999 layers"),
        ({"num_hidden_layers": 10**9}, "layers must be 10000 or less"),
        ({"rope_parameters": {"rope_type": "spiral", "rope_theta": 1.0}}, "rope_type must be one of"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1.0, "twist": 3}}, "has twist"),
    ],
)
def test_configurations_that_do_not_fit(folder, keys, sentence):
    change(folder, **keys)
    with pytest.raises((InvalidArgument, Unsupported), match=sentence) as caught:
        checkpoints.load(folder)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("edit", "sentence"),
    [
        (lambda t: t.pop("model.norm.weight"), "lacks model.norm.weight"),
        (lambda t: t.update({"model.norm.bias": torch.zeros(32)}), "has the unknown model.norm.bias"),
        (lambda t: t.update({"model.norm.weight": torch.zeros(31)}), r"model.norm.weight has shape \[31\]"),
        (lambda t: t.update({"model.norm.weight": torch.ones(32, dtype=torch.int8)}), "has dtype torch.int8"),
    ],
)
def test_tensors_that_do_not_fit(folder, edit, sentence):
    rewrite(folder, edit)
    with pytest.raises(InvalidArgument, match=sentence):
        checkpoints.load(folder)


def test_buffers_of_the_other_library_have_no_meaning(folder):
    rewrite(folder, lambda t: t.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    checkpoints.load(folder)


def test_a_bare_body_lacks_the_prefix(tmp_path):
    def strip(tensors):
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    model = DecoderLM(CONFIG.model_copy(update={"tie_embeddings": True}))
    checkpoints.save(model, tmp_path / "model", family="llama")
    rewrite(tmp_path / "model", strip)
    change(tmp_path / "model", architectures=["LlamaModel"])
    assert torch.equal(checkpoints.load(tmp_path / "model")(TOKENS), model.eval()(TOKENS))


def test_formats_that_run_code_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InvalidArgument, match=r"pytorch_model\.bin, a format that can run code"):
        checkpoints.load(folder)


@pytest.mark.parametrize("name", ["../model.safetensors", "/etc/passwd", "..", "", 3])
def test_an_index_stays_in_its_folder(folder, name):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"model.norm.weight": name}}))
    with pytest.raises(InvalidArgument, match="a file of the same folder is meant"):
        checkpoints.load(folder)


def test_damaged_files_are_named(folder):
    data = (folder / "model.safetensors").read_bytes()
    (folder / "model.safetensors").write_bytes(data[:-100])
    with pytest.raises(StorageError, match=r"cannot read .*model.safetensors"):
        checkpoints.load(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(StorageError, match=r"cannot read .*model.safetensors: no such file"):
        checkpoints.load(folder)


def test_what_is_left_aside_is_named(folder):
    change(folder, attention_dropout=0.1, eos_token_id=[1, 2])
    opened = checkpoints.open_checkpoint(folder)
    assert opened.family == "llama"
    assert opened.ignored["attention_dropout"] == 0.1
    assert opened.ignored["eos_token_id"] == [1, 2]


@pytest.mark.parametrize("dtype", ["bfloat16", torch.float64])
def test_dtypes(saved, dtype):
    model = checkpoints.load(saved[1], dtype=dtype)
    kinds = {p.dtype for p in model.parameters()}
    assert kinds == {torch.bfloat16 if dtype == "bfloat16" else dtype}
    assert model(TOKENS).dtype in kinds


def test_what_another_attention_learns_has_the_dtype_of_the_others(saved):
    model = checkpoints.load(saved[1], dtype="bfloat16", attention="hedgehog-sum")
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model(TOKENS).isfinite().all()


@pytest.mark.parametrize("other", [torch.float16, torch.bfloat16])
def test_tensors_of_several_dtypes_are_read_in_one_that_holds_them(saved, folder, other):
    rounded = "model.layers.0.self_attn.q_proj.weight"
    rewrite(folder, lambda t: t.update({name: t[name].to(other) for name in (rounded, "model.embed_tokens.weight")}))
    model = checkpoints.load(folder)
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    stored = load_file(folder / "model.safetensors")
    parts = [stored[f"model.layers.0.self_attn.{name}_proj.weight"].float() for name in "qkv"]
    assert torch.equal(model.blocks[0].attention.qkv.weight, torch.cat(parts))
    assert model(TOKENS).dtype == torch.float32


def test_norms_keep_a_wider_dtype(folder):
    rewrite(folder, lambda t: t.update({name: t[name].to(torch.bfloat16) for name in t if "norm" not in name}))
    model = checkpoints.load(folder)
    assert model.norm.weight.dtype == torch.float32
    assert model.embedding.weight.dtype == torch.bfloat16
    assert model(TOKENS).dtype == torch.bfloat16


def test_a_dtype_that_only_stores_needs_another_one(folder):
    rewrite(folder, lambda t: t.update({name: t[name].to(torch.float8_e4m3fn) for name in t if "norm" not in name}))
    with pytest.raises(Unsupported, match="is stored as float8_e4m3fn, in which nothing is computed; choose another"):
        checkpoints.load(folder)
    assert checkpoints.load(folder, dtype="bfloat16")(TOKENS).isfinite().all()


def test_a_tied_matrix_may_be_stored_twice_in_two_dtypes(tmp_path):
    model = DecoderLM(CONFIG.model_copy(update={"tie_embeddings": True})).bfloat16()
    checkpoints.save(model, tmp_path / "model", family="llama")
    twin = {"lm_head.weight": model.embedding.weight.detach().float()}
    rewrite(tmp_path / "model", lambda t: t.update(twin))
    assert torch.equal(checkpoints.load(tmp_path / "model").embedding.weight, model.embedding.weight)


def test_json_that_is_nested_without_end(folder):
    (folder / "config.json").write_text("[" * 200_000)
    with pytest.raises(StorageError, match="nested too deeply"):
        checkpoints.load(folder)


def test_a_name_that_is_too_long_is_no_folder():
    with pytest.raises(InvalidArgument, match="there is no folder or file"):
        checkpoints.load("x" * 5000)


def test_an_unknown_dtype_is_refused(saved):
    with pytest.raises(InvalidArgument, match="dtype is 'half'; it is one of float32"):
        checkpoints.load(saved[1], dtype="half")


def test_writing_to_a_loaded_model_leaves_its_file_alone(folder):
    before = (folder / "model.safetensors").read_bytes()
    model = checkpoints.load(folder)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    assert (folder / "model.safetensors").read_bytes() == before
    assert bool(checkpoints.load(folder).norm.weight.any())


def test_a_loaded_model_can_be_trained(saved):
    model = checkpoints.load(saved[1])
    model.loss(TOKENS[:, :-1], TOKENS[:, 1:]).backward()
    assert all(p.grad is not None and bool(p.grad.any()) for p in model.parameters())


@pytest.mark.parametrize("attention", ["taylor4-l2", ["softmax", "elu-sum"], "favor64-sum", "hedgehog-sum"])
def test_attention_is_swapped(saved, attention):
    model, folder = saved
    found = checkpoints.load(folder, attention=attention)
    again = model.with_attention(attention)
    assert found.config.attentions == again.config.attentions
    names = [attention] * 2 if isinstance(attention, str) else attention
    assert list(found.config.attentions) == names
    plain = model.eval()(TOKENS)
    assert not torch.allclose(again.eval()(TOKENS), plain)
    if attention != "hedgehog-sum" and attention != "favor64-sum":  # which are drawn from the seed
        assert torch.equal(found(TOKENS), again(TOKENS))
    assert all(not p.is_meta for p in (*found.parameters(), *found.buffers()))
    assert torch.equal(again.with_attention("softmax")(TOKENS), plain)
    again.norm.weight.data.mul_(2)
    assert torch.equal(model.norm.weight, again.norm.weight), "the weights are shared"
    model.norm.weight.data.div_(2)


def test_what_the_format_cannot_say_is_refused(saved, tmp_path):
    model = saved[0]
    with pytest.raises(Unsupported, match="llama has no way to say attention = 'taylor4-l2'"):
        checkpoints.save(model.with_attention("taylor4-l2"), tmp_path / "a", family="llama")
    with pytest.raises(Unsupported, match="gpt2 has no way to say"):
        checkpoints.save(model, tmp_path / "b", family="gpt2")
    with pytest.raises(Unsupported, match="no architecture of the hub is this model") as caught:
        checkpoints.save(model.with_attention("taylor4-l2"), tmp_path / "c")
    assert str(caught.value) == (
        "no architecture of the hub is this model, the closest being llama, mistral and mixtral: llama has no way "
        "to say attention = 'taylor4-l2'; mercer.models.io.save_model keeps the model as it is, and family=... tells "
        "what another architecture lacks"
    )
    assert not list(tmp_path.iterdir())


def test_the_closest_architecture_is_that_with_the_fewest_lacks():
    fields = {"vocab_size": 50, "dim": 32, "heads": 4, "layers": 2, "feedforward": "gelu", "norm": "layer"}
    with pytest.raises(
        Unsupported, match=r"the closest being gpt2 and gpt_neox: gpt2 has no way to say position = 'alibi';"
    ):
        family_of(ModelConfig(**fields, hidden=128, position="alibi", bias=True))
    with pytest.raises(Unsupported, match="no way to say norm = 'layer', feedforward = 'gelu' and position = "):
        find_family("llama").write_config(ModelConfig(**fields, position="alibi"))
    with pytest.raises(Unsupported, match=r"no architecture of the hub is made of a NoneType$"):
        family_of(None)


def test_nothing_is_overwritten(saved, tmp_path):
    (tmp_path / "there").mkdir()
    (tmp_path / "there" / "mine").write_text("keep")
    with pytest.raises(InvalidArgument, match="is not an empty folder"):
        checkpoints.save(saved[0], tmp_path / "there")
    assert (tmp_path / "there" / "mine").read_text() == "keep"


def test_extra_keys(saved, tmp_path):
    checkpoints.save(saved[0], tmp_path / "model", extra={"bos_token_id": 7})
    assert checkpoints.open_checkpoint(tmp_path / "model").ignored["bos_token_id"] == 7
    for wrong in (float("nan"), object()):
        with pytest.raises(InvalidArgument, match="extra has what JSON cannot say"):
            checkpoints.save(saved[0], tmp_path / "other", extra={"bos_token_id": wrong})
    with pytest.raises(InvalidArgument, match="extra has hidden_size"):
        checkpoints.save(saved[0], tmp_path / "other", extra={"hidden_size": 7})


@pytest.mark.parametrize(
    ("extra", "sentence"),
    [
        ({"licence": "MIT"}, "extra has keys that are not known, licence = 'MIT'"),
        ({"bos_token_id": 7, "quantization_config": {"bits": 4}}, "extra: quantization_config is {'bits': 4}"),
        ({"num_key_value_heads": 1}, "extra has num_key_value_heads"),
        ({"rope_theta": 5e5}, "extra: rope_theta is 500000.0, and in rope_parameters 10000.0"),
    ],
)
def test_extra_keys_that_would_not_be_read_are_refused_before_anything_is_written(saved, tmp_path, extra, sentence):
    with pytest.raises((InvalidArgument, Unsupported), match=sentence):
        checkpoints.save(saved[0], tmp_path / "model", family="llama", extra=extra)
    assert not (tmp_path / "model").exists()


def test_an_extra_key_that_would_make_it_another_model_is_refused(tmp_path):
    config = EncoderConfig(
        vocab_size=50, dim=32, layers=1, heads=4, bias=True, norm="layer", norm_position="post", feedforward="gelu",
        max_length=64, token_types=2, embedding_norm=True, head="classes", classes=2, pool=True,
    )  # fmt: skip
    checkpoints.save(Encoder(config), tmp_path / "two", family="bert", extra={"num_labels": 2})
    with pytest.raises(InvalidArgument, match="extra has a key that changes what is computed, among num_labels"):
        checkpoints.save(Encoder(config), tmp_path / "five", family="bert", extra={"num_labels": 5})
    assert not (tmp_path / "five").exists()


def test_models_of_ours_are_opened_too(saved, tmp_path):
    save_model(saved[0], tmp_path)
    opened = checkpoints.open_checkpoint(tmp_path)
    assert opened.family == "mercer"
    assert torch.equal(opened.model(TOKENS), saved[0].eval()(TOKENS))
    assert checkpoints.load(tmp_path, attention="taylor4-l2").config.attention == "taylor4-l2"


def test_an_unknown_device_is_refused(saved):
    with pytest.raises(InvalidArgument, match="device 'gpu' is not usable here"):
        checkpoints.load(saved[1], device="gpu")


def test_a_file_is_no_folder(saved):
    with pytest.raises(InvalidArgument, match=r"model\.safetensors is a file; name its folder"):
        checkpoints.load(saved[1] / "model.safetensors")


def test_a_run_is_told_from_its_checkpoints(tmp_path):
    (tmp_path / "run.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"is a run; name one of its checkpoints, .*step-"):
        checkpoints.open_checkpoint(tmp_path)
