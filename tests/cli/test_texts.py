"""`mercer generate`, `mercer chat` and `mercer score` on a folder of the hub's format."""

import json
import math

import pytest
import torch
from tests.cli.hub import write_llama
from tests.cli.test_refusals import mercer
from tests.models.chat_templates import CHATML, GEMMA
from typer.testing import CliRunner

from mercer.cli.main import app

pytestmark = pytest.mark.peers
TEXT = "the cat sat on the mat, café 日本. " * 12


@pytest.fixture(scope="module", autouse=True)
def _one_thread():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("llama")


@pytest.fixture(scope="module")
def theirs(folder):
    return write_llama(folder)


@pytest.fixture(scope="module")
def tokenizer(folder, theirs):
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast.from_pretrained(folder)


def continued(theirs, tokenizer, ids, count):
    """The greedy continuation by transformers, cut at the end of a turn."""
    given = torch.tensor([ids])
    out = theirs.generate(given, attention_mask=torch.ones_like(given), max_new_tokens=count, do_sample=False)
    return out[0, len(ids) :].tolist()


def test_greedy_text_is_that_of_transformers(folder, theirs, tokenizer):
    expected = continued(theirs, tokenizer, tokenizer("the cat")["input_ids"], 30)
    result = mercer("generate", "--model", folder, "the cat", "-n", 30, "--temperature", 0, "--no-echo")
    assert result.exit_code == 0, result.output
    assert result.stdout == tokenizer.decode(expected, skip_special_tokens=True) + "\n"
    assert f"3 tokens read, {len(expected)} written in " in result.stderr
    echoed = mercer("generate", "-m", folder, "-p", "the cat", "-n", 30, "--temperature", 0, "-q")
    assert (echoed.stdout, echoed.stderr) == ("the cat" + result.stdout, "")


def test_one_json_object_with_logprobs(folder, theirs, tokenizer):
    flags = ["-n", 5, "--temperature", 0, "--json", "--logprobs", 2, "-q"]
    result = mercer("generate", "-m", folder, "the cat", *flags)
    facts = json.loads(result.stdout)
    ids = [one["token"] for one in facts["tokens"]]
    assert ids[:3] == tokenizer("the cat")["input_ids"]
    assert [one["prompt"] for one in facts["tokens"]] == [True] * 3 + [False] * 5
    with torch.no_grad():
        logs = theirs(torch.tensor([ids])).logits[0].double().log_softmax(-1)
    told = [one["logprob"] for one in facts["tokens"]]
    assert told[0] is None
    assert told[1:] == pytest.approx([float(logs[i, ids[i + 1]]) for i in range(len(ids) - 1)], abs=1e-4)
    assert [one["token"] for one in facts["tokens"][-1]["top"]] == logs[-2].topk(2).indices.tolist()
    assert (facts["tokens_read"], facts["tokens_written"], facts["finish"]) == (3, 5, "length")
    assert facts["text"] == "".join(tokenizer.decode(ids[3:]))


def test_writing_ends_before_a_stop_string(folder):
    flags = ["-n", 30, "--temperature", 0, "--no-echo", "-q"]
    whole = mercer("generate", "-m", folder, "the cat", *flags).stdout[:-1]
    cut = whole[5:7]
    stopped = mercer("generate", "-m", folder, "the cat", *flags, "--stop", "never", "--stop", cut).stdout[:-1]
    assert stopped == whole[: whole.index(cut)]


def test_another_attention_and_dtype(folder):
    common = ["-n", 20, "--temperature", 0, "-q"]
    plain = mercer("generate", "-m", folder, "the cat", *common)
    swapped = mercer("generate", "-m", folder, "the cat", *common, "--attention", "taylor2-sum,softmax", "-j", 1)
    assert swapped.exit_code == 0, swapped.output
    assert swapped.stdout != plain.stdout
    assert mercer("generate", "-m", folder, "the cat", *common, "--dtype", "bfloat16").exit_code == 0


@pytest.mark.slow  # compiles the step
def test_packed_weights_write_and_score_the_same(folder, theirs, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    common = ["generate", "-m", folder, "the cat", "-n", 20, "--temperature", 0, "-q"]
    assert mercer(*common, "--weights", "as_is").stdout == mercer(*common).stdout
    losses = [
        json.loads(mercer("score", "-m", folder, file, "--json", *flags).stdout)["loss"]
        for flags in ([], ["--weights", "as_is"], ["--weights", "int8"])
    ]
    assert losses[1] == pytest.approx(losses[0], abs=1e-4)
    assert losses[2] == pytest.approx(losses[0], abs=0.1)
    assert losses[2] != pytest.approx(losses[0], abs=1e-4)
    flags = ["-m", folder, "-n", 8, "--temperature", 0, "-q"]
    lines = ["the cat", "on the mat?"]
    assert chatting(*flags, "--weights", "as_is", lines=lines).stdout == chatting(*flags, lines=lines).stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--model", "FOLDER"], "give the text to continue once: as the argument, or with --prompt"),
        (["--model", "FOLDER", "a", "-p", "b"], "give the text to continue once"),
        (["FOLDER"], "give the text to continue with --prompt, or as the argument after --model PATH"),
        ([], "name the model: --model PATH, or the folder of a run as the first argument"),
        (["-m", "FOLDER", "a", "--logprobs", "1"], "--logprobs needs --json"),
        (["-m", "FOLDER", "a", "--logprobs", "9999", "--json"], "--logprobs 9999: from 0 to the vocabulary's 332"),
        (["-m", "FOLDER", "a", "--dtype", "int8"], "--dtype is 'int8'; it is one of float32"),
        (
            ["-m", "FOLDER", "a", "--attention", "tailor4"],
            "Error: Unknown attention 'tailor4' (did you mean taylor4-sum?): write softmax, linear or ",
        ),
        (["-m", "FOLDER", "a", "--attention", "tailor4"], "docs/kernels.md and docs/normalizers.md have them all."),
        (["FOLDER", "a cat's"], "write mercer generate --model FOLDER 'a cat'\"'\"'s'."),
        (["-m", "FOLDER", "a", "cat"], "there is a second argument, 'cat'; a text of several words is put in quotes"),
        (["-m", "FOLDER", "a", "--weights", "int2"], "weights must be one of as_is, bfloat16, int8, int4, not 'int2'"),
        (["-m", "FOLDER", "a", "--threads", "0"], "--threads is 0; at least 1 is needed"),
        (["-m", "FOLDER", "a", "--min-p", "2"], "--min-p is 2.0; it is from 0 to 1"),
        (["-m", "FOLDER", "a", "--repetition-penalty", "0"], "--repetition-penalty is 0.0; it is a finite number"),
        (["-m", "FOLDER", "a", "--stop", ""], "--stop is ['']; it is a list of texts"),
        (["-m", "FOLDER", "a", "--checkpoint", "3"], "is no run, so there is no --checkpoint 3 to choose"),
        (["-m", "FOLDER", "a", "-n", "999"], "--max-tokens 999; at most 399 can follow"),
        (["-m", "FOLDER", ""], "the prompt is empty; give at least one character"),
        (["-m", "nowhere", "a"], "there is no folder or file nowhere"),
    ],
)
def test_what_does_not_fit_is_one_sentence(folder, theirs, arguments, message):
    result = mercer("generate", *(folder if argument == "FOLDER" else argument for argument in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr.replace(str(folder), "FOLDER")
    assert result.stderr.count("\n") == 1


def chatting(*arguments, lines):
    given = "".join(f"{line}\n" for line in lines)
    return CliRunner().invoke(app, ["chat", *map(str, arguments)], input=given)


def test_a_chat_refuses_what_would_end_a_turn(folder, theirs, tmp_path):
    plain = tmp_path / "plain.jinja"
    plain.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}[assistant]")
    flags = ["--model", folder, "--template", plain, "-n", 2, "-q"]
    result = chatting(*flags, lines=["the cat", "the cat\t[assistant] sat"])
    assert result.exit_code != 0
    assert "the message has '[assistant]', which this chat template writes between messages as plain" in result.output
    assert "leave it out, or give --no-literal" in result.output
    assert chatting(*flags, "--no-literal", lines=["the cat\t[assistant] sat"]).exit_code == 0
    told = chatting(*flags, "--system", "a [user] b", lines=["the cat"])
    assert "the system message has '[user]'" in told.output


def test_a_chat_from_a_pipe_says_what_rereading_says(folder, theirs, tokenizer):
    flags = ["--model", folder, "-s", "Be brief.", "-n", 12, "--temperature", 0]
    result = chatting(*flags, "--json", lines=["the cat", "", "on the mat?", "/reset", "the cat", "/exit", "never"])
    assert result.exit_code == 0, result.output
    answers = [json.loads(line) for line in result.stdout.splitlines()]
    assert len(answers) == 3
    messages = [{"role": "system", "content": "Be brief."}]
    for content, answer in zip(["the cat", "on the mat?"], answers, strict=False):
        messages.append({"role": "user", "content": content})
        options = {"chat_template": CHATML, "add_generation_prompt": True, "return_dict": False}
        ids = tokenizer.apply_chat_template(messages, **options)
        expected = continued(theirs, tokenizer, ids, 12)
        assert answer["text"] == tokenizer.decode(expected, skip_special_tokens=True)
        assert (answer["tokens"], answer["tokens_written"]) == (len(ids), len(expected))
        messages.append({"role": "assistant", "content": answer["text"]})
    assert answers[1]["tokens_read"] < answers[1]["tokens"]
    assert answers[2]["text"] == answers[0]["text"]
    assert answers[2]["tokens_read"] == answers[2]["tokens"]
    plain = chatting(*flags, "-q", lines=["the cat"])
    assert (plain.stdout, plain.stderr) == (answers[0]["text"] + "\n", "")
    assert " tokens read, " in chatting(*flags, lines=["the cat"]).stderr


def test_chats_with_a_template_of_ones_own(folder, theirs, tmp_path):
    template = tmp_path / "t.jinja"
    template.write_text("{{ messages[-1].content }}{{ mood }}{{ count + 1 }}")
    flags = ["-m", folder, "-n", 3, "--temperature", 0, "--json", "-q", "--template", template]
    result = chatting(*flags, "--variable", "mood=calm", "--variable", "count=2", lines=["the"])
    same = mercer("generate", "-m", folder, "thecalm3", "-n", 3, "--temperature", 0, "--json", "-q", "--no-echo")
    answer = json.loads(result.stdout)
    assert answer["tokens"] == json.loads(same.stdout)["tokens_read"] - 1  # a template writes its own beginning
    wrong = chatting(*flags, "--variable", "mood", lines=["the"])
    assert (wrong.exit_code, "--variable is 'mood'; write a name and a value" in wrong.stderr) == (2, True)


def test_messages_of_a_chat_write_no_special_tokens(folder, theirs, tokenizer):
    flags, line = ["-m", folder, "-n", 4, "--temperature", 0, "--json", "-q"], "the cat<|im_end|> sat"
    literal = json.loads(chatting(*flags, lines=[line]).stdout)
    free = json.loads(chatting(*flags, "--no-literal", lines=[line]).stdout)
    options = {"chat_template": CHATML, "add_generation_prompt": True, "return_dict": False}
    ids = tokenizer.apply_chat_template([{"role": "user", "content": line}], **options)
    assert free["tokens"] == len(ids)
    assert free["text"] == tokenizer.decode(continued(theirs, tokenizer, ids, 4), skip_special_tokens=True)
    spelt = tokenizer("<|im_end|>", split_special_tokens=True, add_special_tokens=False)["input_ids"]
    end = tokenizer.convert_tokens_to_ids("<|im_end|>")
    at = ids.index(end, ids.index(end) + 1)  # after that of the template's system message
    ids[at : at + 1] = spelt
    assert literal["tokens"] == len(ids)
    assert literal["text"] == tokenizer.decode(continued(theirs, tokenizer, ids, 4), skip_special_tokens=True)


def test_chats_that_cannot_be(folder, theirs, tmp_path):
    template = tmp_path / "gemma.jinja"
    template.write_text(GEMMA)
    result = chatting("-m", folder, "--template", template, "-s", "x", lines=["a"])
    assert result.exit_code == 2
    assert result.stderr == f"Error: {template} refuses this chat: System role not supported.\n"
    assert "cannot read" in chatting("-m", folder, "--template", tmp_path / "none", lines=["a"]).stderr


def test_scores_are_those_of_transformers(folder, theirs, tokenizer, tmp_path):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "b.txt").write_text("the dog")
    result = mercer("score", "-m", folder, tmp_path / "a.txt", tmp_path / "b.txt", "--json")
    assert result.exit_code == 0, result.output
    facts = json.loads(result.stdout)
    nats = 0.0
    for told, name in zip(facts["files"], ("a.txt", "b.txt"), strict=True):
        text = (tmp_path / name).read_text()
        ids = torch.tensor(tokenizer(text)["input_ids"])[None]
        with torch.no_grad():
            loss = float(theirs(ids, labels=ids).loss)
        assert told["loss"] == pytest.approx(loss, abs=1e-4)
        assert told["perplexity"] == pytest.approx(math.exp(loss), rel=1e-4)
        assert (told["tokens"], told["bytes"], told["windows"]) == (ids.shape[1] - 1, len(text.encode()), 1)
        nats += loss * told["tokens"]
    assert facts["bits_per_byte"] == pytest.approx(nats / math.log(2) / facts["bytes"], rel=1e-4)
    assert facts["attention"] == ["softmax"]


def test_scores_for_people_by_windows_and_with_another_attention(folder, theirs, tmp_path):
    file = tmp_path / "a.txt"
    file.write_text(TEXT)
    result = mercer("score", "-m", folder, file, "--context", 64, "--stride", 16)
    assert result.stdout.startswith(f"{file}: perplexity ")
    tokens = json.loads(mercer("score", "-m", folder, file, "--json").stdout)["tokens"]
    windows = 1 + math.ceil((tokens - 63) / 16)
    assert f"{tokens} tokens, {len(TEXT.encode())} bytes, {windows} windows of 64" in result.stdout
    swapped = mercer("score", "-m", folder, file, "--attention", "taylor2-sum", "--json")
    assert json.loads(swapped.stdout)["attention"] == ["taylor2-sum"]
    assert mercer("score", "-m", folder, file, file).stdout.splitlines()[2].startswith("all: perplexity ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["none.txt"], "cannot read none.txt: no such file or directory"),
        (["EMPTY"], "empty.txt: the text has no token that follows another"),
        (["FILE", "--context", "999"], "--context 999 is beyond what the model reaches; at most 401"),
        (
            ["FILE", "--stride", "600", "--context", "256"],
            "a.txt: --stride 600 must be a whole number from 1 to 255, with --context 256.",
        ),
        (["FILE", "--context", "1"], "a.txt: --context 1 must be a whole number, and at least 2."),
        (["FILE", "--stride", "0"], "--stride 0"),
    ],
)
def test_scores_that_cannot_be(folder, theirs, tmp_path, arguments, message):
    (tmp_path / "a.txt").write_text(TEXT)
    (tmp_path / "empty.txt").write_text("")
    places = {"FILE": tmp_path / "a.txt", "EMPTY": tmp_path / "empty.txt"}
    result = mercer("score", "-m", folder, *(places.get(argument, argument) for argument in arguments))
    assert (result.exit_code, result.stdout) == (2, "")
    assert message in result.stderr


def test_info_of_a_model_of_the_hub(folder, theirs):
    facts = json.loads(mercer("info", folder, "--json").stdout)
    assert (facts["family"], facts["parameters"]) == ("llama", sum(p.numel() for p in theirs.parameters()))
    assert [layer["attention"] for layer in facts["layers"]] == ["softmax", "softmax"]
    printed = mercer("info", folder)
    assert printed.exit_code == 0, printed.output
    assert printed.stdout.startswith(f"{folder}: llama, {facts['parameters']:,} parameters\n")


def test_a_folder_that_holds_a_gguf_file_is_no_model(tmp_path):
    (tmp_path / "tiny.gguf").write_bytes(b"GGUF")
    result = mercer("generate", "-m", tmp_path, "the cat")
    assert result.exit_code == 2
    assert "is a folder that holds tiny.gguf; name that file" in result.stderr


def test_long_texts_on_a_cpu_tell_of_the_quicker_way(folder, theirs):
    flags = ["-n", 70, "--temperature", 1, "--seed", 3]
    said = mercer("generate", "-m", folder, "the cat", *flags).stderr
    written = int(said.partition(" read, ")[2].partition(" written")[0])
    assert ("--weights as_is" in said) == (written >= 64)
    assert "--weights as_is" not in mercer("generate", "-m", folder, "the cat", *flags, "-q").stderr
