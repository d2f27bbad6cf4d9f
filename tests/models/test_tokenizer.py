"""Vocabularies from the hub's files equal transformers' tokenizers, token by token and as a whole."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tests.models.hub_tokenizers import MAKERS, byte_level, write_folder
from tokenizers import decoders

from mercer.errors import InvalidArgument, Unsupported
from mercer.models.tokenizer import HubVocabulary, load_hub_vocabulary

pytestmark = pytest.mark.peers
SAMPLES = [
    "the cat",
    " the cat sat",
    "  two  spaces",
    "don't, it's 3rd.\n\n\tthe end",
    "café 日本語 \U0001f600 ☃ end",
    "▁ marked",
    "a<|end|>b </s>c [SEP] <|im_start|>user",
    "",
    " ",
    "        deep",
]


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    root = tmp_path_factory.mktemp("folders")
    return {kind: write_folder(root / kind, kind) for kind in MAKERS}


@pytest.fixture(scope="module")
def pairs(folders):
    from transformers import PreTrainedTokenizerFast

    return {
        kind: (load_hub_vocabulary(folder), PreTrainedTokenizerFast.from_pretrained(folder))
        for kind, folder in folders.items()
    }


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("text", SAMPLES)
def test_prompts_and_their_text_equal_transformers(pairs, kind, text):
    ours, theirs = pairs[kind]
    tokens = ours.prompt(text.encode())
    assert tokens == theirs(text)["input_ids"]
    assert ours.prompt(text.encode(), added=False) == theirs(text, add_special_tokens=False)["input_ids"]
    spelt = theirs(text, add_special_tokens=False, split_special_tokens=True)["input_ids"]
    assert ours.encode(text.encode()).tolist() == spelt
    for some in (tokens, spelt):
        expected = theirs.decode(some, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert ours.decode(some).decode() == expected
        assert "".join(ours.stream(some)) == expected


@settings(max_examples=60)
@given(st.data())
def test_any_tokens_stream_to_the_text_of_all_at_once(pairs, data):
    kind = data.draw(st.sampled_from(sorted(MAKERS)))
    ours, theirs = pairs[kind]
    tokens = data.draw(st.lists(st.integers(0, ours.size - 1), max_size=12))
    whole = ours.decode(tokens)
    streamed = "".join(ours.stream(tokens))
    assert streamed == whole.decode("utf-8", "replace")
    cut = data.draw(st.integers(0, len(tokens)))
    if ours.decode(tokens[:cut]).decode("utf-8", "replace").encode() == ours.decode(tokens[:cut]):
        first = "".join(ours.stream(tokens[:cut]))
        assert first + "".join(ours.stream(tokens[cut:], after=tokens[:cut])) == streamed
    if "�" not in streamed:  # where bytes make no character, transformers replaces by other rules
        assert streamed == theirs.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)


@given(st.text(max_size=30))
def test_byte_level_text_round_trips_and_its_bytes_are_counted(pairs, text):
    vocabulary = pairs["byte-level"][0]
    tokens = vocabulary.encode(text.encode())
    assert vocabulary.decode(tokens) == text.encode()
    assert vocabulary.byte_lengths[tokens].sum() == len(text.encode())


def test_a_space_before_a_text_is_dropped_there_alone(pairs):
    vocabulary = pairs["llama2"][0]
    tokens = vocabulary.prompt(b"the cat sat")
    assert vocabulary.decode(tokens) == b"the cat sat"
    cat = next(i for i, token in enumerate(tokens) if vocabulary.name(token).startswith("▁c"))
    assert "".join(vocabulary.stream(tokens[cat:])) == "cat sat"
    assert "".join(vocabulary.stream(tokens[cat:], after=tokens[:cat])) == " cat sat"


@pytest.mark.parametrize("kind", ["byte-level", "llama2"])
def test_characters_come_out_whole(pairs, kind):
    vocabulary = pairs[kind][0]
    tokens = vocabulary.encode("☃\U0001f9ffé".encode())
    assert len(tokens) > 3
    assert list(vocabulary.stream(tokens)) == ["☃", "\U0001f9ff", "é"]
    almost = vocabulary.encode("☃\U0001f9ff".encode())[:-1]
    assert "".join(vocabulary.stream(almost)) == "☃�"


@pytest.mark.parametrize("kind", MAKERS)
def test_special_tokens_are_no_text(pairs, kind):
    ours, theirs = pairs[kind]
    assert ours.special == set(theirs.all_special_ids) | {
        number for number, token in theirs.added_tokens_decoder.items() if token.special
    }
    assert all(not ours.token_bytes(token) and not ours.byte_lengths[token] for token in ours.special)
    assert ours.ends == ({theirs.eos_token_id} if theirs.eos_token_id is not None else set())
    assert ours.names == theirs.special_tokens_map
    begin = {"byte-level": ("<|begin|>",), "t5": (), "bert": ("[CLS]",), "words": ()}.get(kind, ("<s>",))
    assert [ours.name(token) for token in ours.beginning] == list(begin)


@pytest.mark.parametrize(
    "config",
    [
        {"add_bos_token": True, "add_eos_token": True},
        {"add_bos_token": False},
        {"add_eos_token": True},
        {"added_tokens_decoder": {"700": {"content": "<new>", "special": True}}, "bos_token": "<new>"},
        {"added_tokens_decoder": {"1": {"content": "the", "special": True}}},
        {"mask_token": {"__type": "AddedToken", "content": "<mask>", "lstrip": True, "normalized": False}},
        {"extra_special_tokens": ["<tool>", "</tool>"]},
        {"clean_up_tokenization_spaces": True},
    ],
    ids=str,
)
def test_settings_of_the_configuration(tmp_path, config):
    from transformers import PreTrainedTokenizerFast

    size = byte_level().get_vocab_size()
    if "700" in config.get("added_tokens_decoder", {}):
        config = config | {"added_tokens_decoder": {str(size): config["added_tokens_decoder"]["700"]}}
    elif "added_tokens_decoder" in config:  # a token of the model becomes special
        number = byte_level().token_to_id("the")
        config = config | {"added_tokens_decoder": {str(number): config["added_tokens_decoder"]["1"]}}
    folder = write_folder(tmp_path, "byte-level", **config)
    ours, theirs = load_hub_vocabulary(folder), PreTrainedTokenizerFast.from_pretrained(folder)
    for text in ("a <new>b the  <mask> <tool>x</tool> .", "the"):
        tokens = ours.prompt(text.encode())
        assert tokens == theirs(text)["input_ids"]
        assert ours.decode(tokens).decode() == theirs.decode(tokens, skip_special_tokens=True)
    assert ours.size == max(theirs.get_vocab().values()) + 1


def test_ends_come_from_the_files_of_generation(tmp_path):
    folder = write_folder(tmp_path, "byte-level")
    end = load_hub_vocabulary(folder).tokenizer.token_to_id
    (folder / "config.json").write_text(json.dumps({"eos_token_id": end("<|im_end|>")}))
    assert load_hub_vocabulary(folder).ends == {end("<|im_end|>")}
    both = [end("<|im_end|>"), end("<|end|>")]
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": both}))
    loaded = load_hub_vocabulary(folder)
    assert loaded.ends == set(both)
    saved = tmp_path / "saved"
    saved.mkdir()
    loaded.save(saved)
    again = load_hub_vocabulary(saved)
    assert (again.ends, again.names, again.prompt(b"the <|end|>")) == (
        loaded.ends,
        loaded.names,
        loaded.prompt(b"the <|end|>"),
    )
    for wrong in ('"x"', "-1", "99999999999999"):
        (folder / "generation_config.json").write_text(f'{{"eos_token_id": {wrong}}}')
        with pytest.raises(InvalidArgument, match=r"generation_config.json: eos_token_id is "):
            load_hub_vocabulary(folder)
    (folder / "generation_config.json").write_text('{"eos_token_id": 99999}')
    with pytest.raises(InvalidArgument, match="has no token 99999, which is to end a text"):
        load_hub_vocabulary(folder)


def test_older_folders_name_special_tokens_in_a_file_of_their_own(tmp_path):
    folder = write_folder(tmp_path, "byte-level", eos_token=None)
    (folder / "special_tokens_map.json").write_text('{"eos_token": {"content": "<|im_end|>", "single_word": false}}')
    vocabulary = load_hub_vocabulary(folder)
    assert vocabulary.names == {"bos_token": "<|begin|>", "eos_token": "<|im_end|>"}
    assert [vocabulary.name(token) for token in vocabulary.ends] == ["<|im_end|>"]


def test_models_may_have_more_numbers_than_the_tokenizer_has_tokens(tmp_path):
    folder = write_folder(tmp_path, "byte-level")
    size = load_hub_vocabulary(folder).size
    vocabulary = load_hub_vocabulary(folder, size + 10)
    assert vocabulary.token_bytes(size + 5) == b""
    assert "".join(vocabulary.stream([size + 5])) == ""
    with pytest.raises(InvalidArgument, match=rf"has {size} tokens, but the model has {size - 1}"):
        load_hub_vocabulary(folder, size - 1)


def test_folders_that_cannot_be_read(tmp_path):
    with pytest.raises(InvalidArgument, match=r"tokenizer.json is missing: without it"):
        load_hub_vocabulary(tmp_path)
    folder = write_folder(tmp_path / "a", "byte-level", bos_token=3)
    with pytest.raises(InvalidArgument, match=r"tokenizer_config.json: bos_token is 3"):
        load_hub_vocabulary(folder)
    write_folder(folder, "byte-level", added_tokens_decoder={"5": {"content": "<new>"}})
    with pytest.raises(InvalidArgument, match=r"numbers '<new>' 5, but in tokenizer.json it is \d+"):
        load_hub_vocabulary(folder)
    (folder / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgument, match=r"cannot read .*tokenizer.json: "):
        load_hub_vocabulary(folder)


def test_decoders_that_need_more_than_the_token_are_refused():
    tokenizer = byte_level()
    tokenizer.decoder = decoders.BPEDecoder("</w>")
    with pytest.raises(Unsupported, match=r"the decoder BPEDecoder\(suffix='</w>'\), which is not known; known are"):
        HubVocabulary(tokenizer)
    with pytest.raises(InvalidArgument, match=r"the tokenizer has no token '<none>', which bos_token names"):
        HubVocabulary(byte_level(), names={"bos_token": "<none>"})


def test_tokens_of_other_properties_in_the_configuration_win(tmp_path):
    folder = write_folder(tmp_path, "byte-level")
    token = load_hub_vocabulary(folder).tokenizer.token_to_id("<|im_end|>")
    plain = load_hub_vocabulary(folder).prompt(b"a <|im_end|> b")
    fields = {"content": "<|im_end|>", "lstrip": True, "rstrip": True, "special": True, "normalized": False}
    write_folder(folder, "byte-level", added_tokens_decoder={str(token): fields})
    stripped = load_hub_vocabulary(folder).prompt(b"a <|im_end|> b")
    assert len(stripped) < len(plain)


@pytest.mark.parametrize("listed", [[1], {"x": {"content": "a"}}, {"-1": {"content": "a"}}])
def test_tokens_of_the_configuration_have_numbers(tmp_path, listed):
    write_folder(tmp_path / "model", "byte-level", added_tokens_decoder=listed)
    with pytest.raises(InvalidArgument, match="added_tokens_decoder is no object of numbers and tokens"):
        load_hub_vocabulary(tmp_path / "model")
