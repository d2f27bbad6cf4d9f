"""Attributes that are found when they are first asked for, in a way that compilers can trace."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Kept(Generic[T]):
    """A method as an attribute that is found once and then kept: `functools.cached_property` without the lock that
    Python 3.11 holds meanwhile, which `torch.compile` does not trace.
    """

    def __init__(self, find: Callable[[Any], T]) -> None:
        self.find = find
        self.__doc__ = find.__doc__

    def __set_name__(self, owner: type, name: str) -> None:
        self.name = name

    def __get__(self, instance: object, owner: type) -> T:
        value = self.find(instance)
        setattr(instance, self.name, value)  # which is seen before this from now on
        return value
