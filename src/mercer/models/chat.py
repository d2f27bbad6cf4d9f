"""From the messages of a chat to the text that a model reads: the Jinja template in the model's folder.

A template comes with the weights, from whoever made them, so it runs in Jinja's immutable sandbox: it sees copies of
the messages made of plain values, and can neither reach objects of Python nor change what it is given. Its loops and
macros are counted, so that they end.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any, Never

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Macro
from jinja2.sandbox import ImmutableSandboxedEnvironment

from mercer.errors import InvalidArgument
from mercer.runtime.files import read_json

if TYPE_CHECKING:
    from mercer.models.vocabulary import Vocabulary

TEMPLATE_FILE = "chat_template.jinja"
MORE_FOLDER = "additional_chat_templates"
CONFIG_FILE = "tokenizer_config.json"
MOST_PASSES = 2_000_000
Message = Mapping[str, Any]


class _Refused(Exception):
    """What `raise_exception` in a template raises."""


class _Generation(Extension):
    """``{% generation %}...{% endgeneration %}``, by which trainers mark what the model is to learn: its body."""

    tags = {"generation"}  # noqa: RUF012  (as jinja2 declares it)

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller: Macro) -> str:
        return caller()


class _Environment(ImmutableSandboxedEnvironment):
    """Counts the passes of loops and the calls of macros, of which a rendering has so many at most."""

    passes = 0

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for node in tree.find_all((nodes.For, nodes.Macro)):
            call = nodes.Call(nodes.EnvironmentAttribute("count"), [], [], None, None)
            node.body.insert(0, nodes.ExprStmt(call).set_lineno(node.lineno))
        return tree

    def count(self) -> None:
        self.passes += 1
        if self.passes > MOST_PASSES:
            raise _Refused(f"it has gone through more than {MOST_PASSES:,} passes of its loops and macros")


class ChatTemplate:
    """A chat template, as models of the hub have them.

    Templates see messages, tools, documents, add_generation_prompt and the special tokens by role (bos_token, ...), and
    may call raise_exception, strftime_now, and tojson without escapes for HTML. Blocks take the newline after them and
    the spaces before them; break and continue work, and the tag generation gives its body.

    Args:
        source: the template's text.
        names: special tokens by their roles.
        where: names the template in errors.
        clock: what strftime_now formats.

    Raises:
        InvalidArgument: the text is not a template; the message has the line.
    """

    def __init__(
        self,
        source: str,
        names: Mapping[str, str] | None = None,
        *,
        where: str = "the chat template",
        clock: Callable[[], datetime] = datetime.now,
    ) -> None:
        self.source, self.names, self._where = source, dict(names or {}), where
        if not isinstance(source, str):  # pyright: ignore[reportUnnecessaryIsInstance]
            raise InvalidArgument(f"{where} is no text but of {type(source).__name__}")
        environment = _Environment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        del environment.globals["lipsum"]  # as much text as asked for
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["dict"] = lambda *given, **fields: dict(*given, **fields)  # not the class and its methods
        environment.globals["strftime_now"] = lambda form: clock().strftime(form)
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise InvalidArgument(f"{where} is not a template, in line {error.lineno}: {error.message}") from error
        except (RecursionError, MemoryError) as error:
            raise InvalidArgument(f"{where} is not a template: it is nested too deeply") from error
        self._environment = environment

    def render(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> str:
        """The text of a chat.

        Args:
            messages: {"role": "user", "content": "..."} and whatever else the template reads, of plain JSON values;
                keys whose value is None are left out.
            tools: JSON schemas of functions.
            documents: objects with title and text.
            add_generation_prompt: end with the header of the model's turn.
            more: further variables of this template, such as enable_thinking=False.

        Raises:
            InvalidArgument: the template refuses the messages, fails, or a value is not of JSON.
        """
        return self._written(self._values(messages, tools, documents, add_generation_prompt, more))

    def tokens(
        self,
        vocabulary: Vocabulary,
        messages: Sequence[Message],
        *,
        literal: bool = True,
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **more: Any,
    ) -> list[int]:
        """The tokens of a chat, those of what `render` writes.

        Args:
            vocabulary: the model's.
            literal: read the texts of messages, tools and documents as they are spelt, so that none of them can write a
                special token such as the end of a turn (:mod:`mercer.models.literal`). Where no text spells one, the
                tokens are the same. False reads them as transformers does: a special token's name is that token.
            messages, tools, documents, add_generation_prompt, more: as for `render`.

        Raises:
            InvalidArgument: as for `render`; or the template cuts a text in the middle of a special token's name.
        """
        values = self._values(messages, tools, documents, add_generation_prompt, more)
        reader = vocabulary.literal() if literal else None
        if reader is not None:
            values |= {name: reader.hide(values[name]) for name in ("messages", "tools", "documents")}
        text = self._written(values)
        found = None if reader is None else reader.tokens(text)
        return vocabulary.prompt(text.encode(), added=False) if found is None else found

    def _values(
        self,
        messages: Sequence[Message],
        tools: Sequence[Mapping[str, Any]] | None,
        documents: Sequence[Mapping[str, Any]] | None,
        add_generation_prompt: bool,
        more: Mapping[str, Any],
    ) -> dict[str, Any]:
        """What a template sees, made of plain values."""
        shown = []
        for i, message in enumerate(messages):
            if not isinstance(message, Mapping):
                raise InvalidArgument(f"messages[{i}] is {message!r}; a message has a role and a content")
            shown.append(_plain({key: value for key, value in message.items() if value is not None}, f"messages[{i}]"))
        for name, value in (("tools", tools), ("documents", documents)):
            if value is not None and (isinstance(value, str | Mapping) or not isinstance(value, Sequence)):  # pyright: ignore[reportUnnecessaryIsInstance]
                raise InvalidArgument(f"{name} is {value!r}; it is a list of objects")
        values = {
            "messages": shown,
            "tools": None if tools is None else _plain(list(tools), "tools"),
            "documents": None if documents is None else _plain(list(documents), "documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        return values | self.names | {name: _plain(value, name) for name, value in more.items()}

    def _written(self, values: Mapping[str, Any]) -> str:
        try:
            self._environment.passes = 0
            text = self._template.render(values)
            text.encode()
            return text
        except UnicodeEncodeError as error:
            raise InvalidArgument(f"{self._where} writes halves of characters for this chat: {error}") from error
        except _Refused as error:
            raise InvalidArgument(f"{self._where} refuses this chat: {error}") from error
        except TemplateError as error:
            raise InvalidArgument(f"{self._where} does not fit this chat: {error.message}") from error
        except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError, RecursionError) as error:
            raise InvalidArgument(f"{self._where} does not fit this chat: {error}") from error
        except MemoryError as error:
            raise InvalidArgument(f"{self._where} writes more than fits into memory") from error


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> Never:
    raise _Refused(message)


def _plain(value: Any, where: str) -> Any:
    """A copy made of plain values only, which have no methods that a template could misuse."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item, f"{where}[{key!r}]") for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item, f"{where}[{i}]") for i, item in enumerate(value)]
    raise InvalidArgument(f"{where} is of {type(value).__name__}; chats are made of JSON's values")


def load_chat_template(
    folder: str | Path, names: Mapping[str, str] | None = None, *, template: str | None = None
) -> ChatTemplate:
    """The chat template of a folder in the hub's format.

    ``chat_template.jinja`` and ``additional_chat_templates/*.jinja``, where there are any, else the chat_template of
    ``chat_template.json`` or ``tokenizer_config.json``: one text, or a list of named ones.

    Args:
        folder: where the files are.
        names: special tokens by their roles, as `HubVocabulary.names` has them.
        template: the name of one of several; None takes the one called default.

    Raises:
        InvalidArgument: there is none, none of that name, or it is not a template.
    """
    folder = Path(folder)
    found = _templates(folder)
    if not found:
        raise InvalidArgument(
            f"{folder} has no chat template: the model was not made for chats, or the file is missing"
        )
    chosen = template or "default"
    if chosen not in found:
        asked = f"no chat template {chosen!r}" if template else "several chat templates and none is the default"
        raise InvalidArgument(f"{folder} has {asked}; choose one of {', '.join(sorted(found))}")
    source, path = found[chosen]
    return ChatTemplate(source, names, where=f"the chat template in {path}")


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InvalidArgument(f"cannot read {path}: {error}") from error


def _templates(folder: Path) -> dict[str, tuple[str, Path]]:
    """Text and file of each template, by name."""
    files = {path.stem: path for path in sorted((folder / MORE_FOLDER).glob("*.jinja"))}
    if (folder / TEMPLATE_FILE).exists():
        files["default"] = folder / TEMPLATE_FILE
    if files:
        return {name: (_text(path), path) for name, path in files.items()}
    for path in (folder / "chat_template.json", folder / CONFIG_FILE):
        values = read_json(path) if path.exists() else {}
        value = values.get("chat_template") if isinstance(values, dict) else None
        if value is None:
            continue
        if isinstance(value, str):
            return {"default": (value, path)}
        try:
            return {part["name"]: (part["template"] + "", path) for part in value}
        except (TypeError, KeyError):
            raise InvalidArgument(
                f"{path}: chat_template is neither a text nor a list of names and templates"
            ) from None
    return {}
