"""Sentences that name what was typed: the library's names of its arguments become the flags of the command."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from mercer.errors import InvalidArgument, StorageError


@contextmanager
def as_typed(command: Callable[..., Any]) -> Iterator[None]:
    """Errors inside the block name the flags of ``command``: ``--top-k is 0`` for ``top_k is 0``, ``--max-tokens 9``
    for ``max_tokens=9``, ``--echo`` for ``echo=True``, ``--no-echo`` for ``echo=False``, ``--steps`` for
    ``train.steps``. Names without a flag stay as they are."""
    names = "|".join(sorted(command.__annotations__, key=len, reverse=True))

    def flag(found: re.Match[str]) -> str:
        no = "no-" if found["then"] == "=False" else ""
        then = {"=": " ", "=True": "", "=False": ""}.get(found["then"], found["then"])
        return f"--{no}{found['name'].replace('_', '-')}{then}"

    try:
        yield
    except (InvalidArgument, StorageError) as error:
        text = str(error)
        text = re.sub(rf"\b(?:model|train)\.(?P<name>{names})\b(?P<then>)", flag, text)
        text = re.sub(rf"(?<![\w.-])(?P<name>{names})(?P<then>=(?:(?:True|False)\b)?)", flag, text)
        text = re.sub(rf"^(?P<name>{names})(?P<then> is )", flag, text)  # elsewhere "text is" is plain English
        text = re.sub(r"\bor restart$", "or give --restart", text)
        error.args = (re.sub(r", or None to \w+ \w+ \w+$", "", text),)
        raise
