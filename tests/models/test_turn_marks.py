"""Which lines of a template a message could write too."""

import pytest
from tests.models.chat_templates import CHATML, GEMMA, LLAMA2, TEMPLATES
from tests.models.hub_tokenizers import byte_level, sentencepiece

from mercer.models.chat import ChatTemplate
from mercer.models.tokenizer import HubVocabulary
from mercer.models.turn_marks import turn_marks
from mercer.models.vocabulary import Bytes

CHATML_VOCABULARY = HubVocabulary(byte_level(), names={"bos_token": "<|begin|>", "eos_token": "<|im_end|>"})
LLAMA_VOCABULARY = HubVocabulary(sentencepiece(prepend="all"), names={"bos_token": "<s>", "eos_token": "</s>"})


@pytest.mark.parametrize(
    ("source", "vocabulary", "marks"),
    [
        (LLAMA2, LLAMA_VOCABULARY, ("<</SYS>>", "[/INST]")),
        (CHATML, CHATML_VOCABULARY, ()),
        (TEMPLATES["qwen3"], CHATML_VOCABULARY, ()),
        (GEMMA, LLAMA_VOCABULARY, ()),  # which has <end_of_turn>
        (GEMMA, CHATML_VOCABULARY, ("<end_of_turn>", "<start_of_turn>model", "<start_of_turn>user")),
        (CHATML, Bytes(), ("<|im_end|>", "<|im_start|>user", "<|im_start|>assistant")),
        (
            "{% for m in messages %}{{ m.role | upper }}: {{ m.content }}\n\n{% endfor %}ASSISTANT:", Bytes(),
            ("USER:", "ASSISTANT:"),
        ),
        ("{% for m in messages %}{{ m.content }}\n{% endfor %}A:", Bytes(), ()),  # too short to look for
        ("{{ raise_exception('no') }}", Bytes(), ()),
    ],
)  # fmt: skip
def test_marks(source, vocabulary, marks):
    assert turn_marks(ChatTemplate(source, {"bos_token": "<s>", "eos_token": "</s>"}), vocabulary) == marks


def test_variables_reach_the_template():
    template = ChatTemplate("{{ messages[0].content }}{{ behind }}", {})
    assert turn_marks(template, Bytes(), {"behind": "### Answer:"}) == ("### Answer:",)
    assert turn_marks(template, Bytes()) == ()
