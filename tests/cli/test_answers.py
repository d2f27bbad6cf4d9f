"""`mercer generate` with encoder-decoders, which read the text and write another."""

import json

import pytest
import torch
from tests.checkpoints.zoo import make
from tests.cli.test_refusals import mercer
from tests.models.hub_tokenizers import byte_level, write_folder

pytestmark = pytest.mark.peers
KINDS = {
    "t5": ("T5ForConditionalGeneration", {"d_kv": 8, "d_ff": 48, "num_layers": 2, "num_heads": 4}),
    "marian": (
        "MarianMTModel",
        {f"{side}_{name}": n for side in ("encoder", "decoder") for name, n in (("layers", 2), ("ffn_dim", 48))}
        | {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "max_position_embeddings": 128},
    ),
}


@pytest.fixture(params=KINDS)
def pair(request, tmp_path):
    kind, settings = KINDS[request.param]
    tokenizer = byte_level()
    special = {"pad_token_id": 0, "eos_token_id": tokenizer.token_to_id("<|im_end|>"), "decoder_start_token_id": 0}
    model = make(kind, settings | special | {"vocab_size": tokenizer.get_vocab_size() + 6, "d_model": 32}, tmp_path)
    write_folder(tmp_path, "byte-level")
    return model, tmp_path


def test_what_is_written_is_what_transformers_writes(pair):
    theirs, folder = pair
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast.from_pretrained(folder)
    ids = torch.tensor([tokenizer("the cat sat")["input_ids"]])
    theirs.generation_config.forced_eos_token_id = None
    out = theirs.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=12, do_sample=False, num_beams=1, bad_words_ids=None
    )
    result = mercer("generate", "-m", folder, "the cat sat", "-n", 12, "--temperature", 0, "--json", "-q")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    assert facts["tokens_read"] == ids.shape[1]
    assert facts["text"] == tokenizer.decode(out[0, 1:], skip_special_tokens=True)
    plain = mercer("generate", "-m", folder, "the cat sat", "-n", 12, "--temperature", 0, "-q")
    assert plain.stdout == facts["text"] + "\n", "the question is not printed before the answer"


@pytest.mark.parametrize("flags", [["--weights", "int8"], ["--allow-longer"]])
def test_what_is_for_decoders_alone_is_refused(pair, flags):
    result = mercer("generate", "-m", pair[1], "the cat", *flags)
    assert result.exit_code == 2
    assert "is an encoder-decoder, which --" in result.stderr


def test_chats_and_scores_are_of_decoders(pair):
    for command in (["chat", "-m", pair[1]], ["score", "-m", pair[1], __file__]):
        result = mercer(*command)
        assert result.exit_code == 2
        assert "does not continue texts; decoders do" in result.stderr
