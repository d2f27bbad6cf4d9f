"""Marking what `torch.compile` must not look into, without importing the compiler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

F = TypeVar("F", bound=Callable[..., Any])


def constant_result(function: F) -> F:
    """Let `torch.compile` call a function while it traces and keep what it returns as a constant.

    The same as `torch.compiler.assume_constant_result`, which takes no other step than this one but imports the
    compiler first: a second or two of every program that compiles nothing.
    """
    vars(function)["_dynamo_marked_constant"] = True
    return function
