"""Chat templates render as transformers renders them, in a sandbox."""

import json
from datetime import datetime

import pytest
from tests.models.chat_templates import BLOCKS, CHATML, LLAMA2, LLAMA3, QWEN3, TEMPLATES
from tests.models.hub_tokenizers import write_folder

from mercer.errors import InvalidArgument
from mercer.models.chat import ChatTemplate, load_chat_template
from mercer.models.tokenizer import load_hub_vocabulary

SYSTEM = {"role": "system", "content": " Be <b>brief</b> & 'kind'. "}
TURNS = [
    {"role": "user", "content": "What's 1 < 2?\n"},
    {"role": "assistant", "content": "<think>\nhm\n</think>\n\nTrue, é 日本"},
    {"role": "user", "content": '  And "3"? '},
]
CHATS = {
    "one": TURNS[:1],
    "three": TURNS,
    "system": [SYSTEM, *TURNS],
    "ended": [SYSTEM, *TURNS[:2]],
    "parts": [{"role": "user", "content": [{"type": "text", "text": "look"}, {"type": "image"}]}],
    "none": [{"role": "user", "content": "hi", "tool_calls": None, "name": None}],
}
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"a": {"type": "number", "note": "<é>"}}}}]


@pytest.fixture(scope="module")
def theirs(tmp_path_factory):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(write_folder(tmp_path_factory.mktemp("folder"), "byte-level"))


@pytest.mark.peers
@pytest.mark.parametrize("prompted", [True, False])
@pytest.mark.parametrize("chat", CHATS)
@pytest.mark.parametrize("name", TEMPLATES)
def test_chats_are_rendered_as_by_transformers(theirs, name, chat, prompted):
    messages = CHATS[chat]
    template = ChatTemplate(TEMPLATES[name], theirs.special_tokens_map)
    options = {"tools": TOOLS, "enable_thinking": False} if prompted else {}
    try:
        expected = theirs.apply_chat_template(
            messages, chat_template=TEMPLATES[name], add_generation_prompt=prompted, tokenize=False, **options
        )
    except Exception:  # noqa: BLE001  (what transformers lets through from jinja or raises itself)
        with pytest.raises(InvalidArgument, match=r"the chat template (refuses|does not fit) this chat: "):
            template.render(messages, add_generation_prompt=prompted, **options)
        return
    assert template.render(messages, add_generation_prompt=prompted, **options) == expected


@pytest.mark.peers
def test_tokens_of_a_chat_are_those_of_transformers(theirs, tmp_path):
    folder = write_folder(tmp_path, "byte-level", chat_template=CHATML)
    vocabulary = load_hub_vocabulary(folder)
    template = load_chat_template(folder, vocabulary.names)
    tokens = vocabulary.prompt(template.render(CHATS["system"]).encode(), added=False)
    kwargs = {"chat_template": CHATML, "add_generation_prompt": True, "return_dict": False}
    assert tokens == theirs.apply_chat_template(CHATS["system"], **kwargs)
    assert vocabulary.name(tokens[0]) == "<|im_start|>"


def test_blocks_take_their_line_and_the_clock_is_told():
    text = ChatTemplate(BLOCKS, {"eos_token": "</s>"}).render([SYSTEM, {"role": "user", "content": "<é>"}])
    line = '{"role": "user", "content": "<é>"} </s>\n'
    assert text == f"<user1> {line}<user2> {line}done"  # a template's last newline goes, as jinja2 has it
    template = ChatTemplate(LLAMA3, {"bos_token": "<s>"}, clock=lambda: datetime(2024, 7, 26))
    assert "Today Date: 26 Jul 2024\n" in template.render(TURNS[:1])
    assert "Today Date: today\n" in template.render(TURNS[:1], date_string="today")


def test_messages_are_left_as_they_were():
    source = "{{ messages[0].update({'role': 'x'}) }}"
    messages = [{"role": "user", "content": "a"}]
    with pytest.raises(InvalidArgument, match=r"does not fit this chat: .*update.*"):
        ChatTemplate(source).render(messages)
    assert messages == [{"role": "user", "content": "a"}]


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ raise_exception.__globals__.os }}",
        "{{ dict.update(messages[0], {'role': 'x'}) }}",
        "{{ messages.append(1) }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{% for i in range(10**9) %}{% endfor %}",
        "{{ 'a' * none }}",
        "{{ 1 / 0 }}",
        "{{ messages[0].content.nothing.more }}",
        "{% include '/etc/passwd' %}",
    ],
)
def test_templates_cannot_reach_out_and_their_faults_are_one_sentence(source):
    with pytest.raises(InvalidArgument, match=r"the chat template does not fit this chat: ") as raised:
        ChatTemplate(source).render(TURNS)
    assert "\n" not in str(raised.value)


def test_refusals_and_faults_are_told():
    with pytest.raises(InvalidArgument, match="refuses this chat: Conversation roles must alternate"):
        ChatTemplate(LLAMA2, {"bos_token": "<s>", "eos_token": "</s>"}).render(TURNS[1:])
    with pytest.raises(InvalidArgument, match=r"the chat template is not a template, in line 2: .*endfor"):
        ChatTemplate("a\n{% endfor %}")
    with pytest.raises(InvalidArgument, match=r"messages\[1\] is 'hello'; a message has a role and a content"):
        ChatTemplate(CHATML).render([TURNS[0], "hello"])
    with pytest.raises(InvalidArgument, match=r"messages\[0\]\['content'\] is of set; chats are made of JSON's values"):
        ChatTemplate(CHATML).render([{"role": "user", "content": {1}}])


def test_where_templates_are_found(tmp_path):
    with pytest.raises(InvalidArgument, match="has no chat template: the model was not made for chats"):
        load_chat_template(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "one"}))
    assert load_chat_template(tmp_path).source == "one"
    named = [{"name": "default", "template": "two"}, {"name": "tool_use", "template": "three"}]
    config.write_text(json.dumps({"chat_template": named}))
    assert load_chat_template(tmp_path).source == "two"
    assert load_chat_template(tmp_path, template="tool_use").source == "three"
    config.write_text(json.dumps({"chat_template": named[1:]}))
    with pytest.raises(InvalidArgument, match="several chat templates and none is the default; choose one of tool_use"):
        load_chat_template(tmp_path)
    config.write_text(json.dumps({"chat_template": 3}))
    with pytest.raises(InvalidArgument, match="chat_template is neither a text nor a list of names and templates"):
        load_chat_template(tmp_path)
    (tmp_path / "chat_template.json").write_text(json.dumps({"chat_template": "four"}))
    assert load_chat_template(tmp_path).source == "four"
    (tmp_path / "chat_template.jinja").write_text(QWEN3)
    (tmp_path / "additional_chat_templates").mkdir()
    (tmp_path / "additional_chat_templates" / "rag.jinja").write_text("five")
    assert load_chat_template(tmp_path).source == QWEN3
    assert load_chat_template(tmp_path, template="rag").source == "five"
    with pytest.raises(InvalidArgument, match="has no chat template 'tool_use'; choose one of default, rag"):
        load_chat_template(tmp_path, template="tool_use")


@pytest.mark.parametrize(
    ("source", "sentence"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "more than 5,000 passes"),
        ("{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(40) }}", "5,000 passes"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "does not fit this chat: maximum recursion"),
        ("{{ lipsum(n=10**9) }}", "'lipsum' is undefined"),
        ("{{ 'a' * 10 ** 17 }}", "writes more than fits into memory"),
        (r"{{ '\udc80' }}", "writes halves of characters"),
    ],
)
def test_templates_end(source, sentence, monkeypatch):
    monkeypatch.setattr("mercer.models.chat.MOST_PASSES", 5_000)
    template = ChatTemplate(source)
    for _ in range(2):  # counted anew each time
        with pytest.raises(InvalidArgument, match=sentence):
            template.render([{"role": "user", "content": "hi"}])


def test_loops_that_end_are_counted_anew_for_each_chat(monkeypatch):
    monkeypatch.setattr("mercer.models.chat.MOST_PASSES", 5)
    template = ChatTemplate("{% for i in range(5) %}{{ i }}{% else %}none{% endfor %}")
    assert [template.render([]) for _ in range(3)] == ["01234"] * 3
    monkeypatch.setattr("mercer.models.chat.MOST_PASSES", 0)
    assert ChatTemplate("{% for i in [] %}{{ i }}{% else %}none{% endfor %}").render([]) == "none"


@pytest.mark.parametrize("source", ["{{ " + "(" * 3000 + "1" + ")" * 3000 + " }}", None, ["x"]])
def test_what_is_no_template(source):
    with pytest.raises(InvalidArgument, match=r"is not a template: it is nested too deeply|is no text but of"):
        ChatTemplate(source)


@pytest.mark.parametrize("tools", [1, "read", {"name": "read"}])
def test_tools_are_a_list(tools):
    with pytest.raises(InvalidArgument, match=r"tools is .*; it is a list of objects"):
        ChatTemplate("{{ tools }}").render([], tools=tools)


def test_a_template_that_is_no_text_is_named(tmp_path):
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(InvalidArgument, match=r"cannot read .*chat_template.jinja"):
        load_chat_template(tmp_path)
