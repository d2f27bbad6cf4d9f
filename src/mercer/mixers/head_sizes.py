"""Channels and heads of the parts of mixers, from those of a model, or why they do not fit.

Here, free of torch, since a configuration asks before there is a mixer.
"""

from __future__ import annotations

from mercer.errors import InvalidArgument


def head_size(mixer: str, what: str, dim: int, expand: float, heads: int) -> int:
    """expand dim / heads, which must be a whole number of 1 or more.

    Raises:
        InvalidArgument: it is none.
    """
    if heads < 1:
        raise InvalidArgument(f"{mixer} needs at least 1 head, not {heads}")
    size = expand * dim / heads
    if size != int(size) or size < 1:
        raise InvalidArgument(
            f"{mixer} needs a whole number of {what} channels in each head: {expand:g} * {dim} / {heads} heads is "
            f"{size:g}"
        )
    return int(size)


def key_and_value(mixer: str, dim: int, heads: int, key_expand: float, value_expand: float) -> tuple[int, int]:
    """Channels of a head's keys and of its values.

    Raises:
        InvalidArgument: not whole numbers.
    """
    return head_size(mixer, "key", dim, key_expand, heads), head_size(mixer, "value", dim, value_expand, heads)


def turned_key_and_value(dim: int, heads: int, value_expand: float) -> tuple[int, int]:
    """Of retention: keys of dim / heads channels, which turn in pairs.

    Raises:
        InvalidArgument: an odd number of them, or not whole numbers.
    """
    if heads < 1 or dim % heads or (dim // heads) % 2:
        raise InvalidArgument(f"retnet needs an even number of key channels in each head, not {dim} / {heads} heads")
    return dim // heads, head_size("retnet", "value", dim, value_expand, heads)


def mamba_inner(dim: int, expand: int, inner: int | None, heads: int) -> int:
    """Channels inside Mamba.

    Raises:
        InvalidArgument: the heads do not divide them.
    """
    inner = expand * dim if inner is None else inner
    if inner % heads:
        raise InvalidArgument(f"{heads} heads do not divide the {inner} channels inside mamba")
    return inner


def mamba2_sizes(dim: int, head_dim: int, expand: int, groups: int, norm_groups: int | None) -> tuple[int, int, int]:
    """Channels inside Mamba-2, heads, and groups of channels that are normed alone.

    Raises:
        InvalidArgument: one of the sizes does not divide what it should.
    """
    inner = expand * dim
    if inner % head_dim:
        raise InvalidArgument(
            f"mamba2 has {expand} * {dim} channels inside, which heads of {head_dim} do not divide: choose another "
            "head_dim"
        )
    heads = inner // head_dim
    if heads % groups:
        raise InvalidArgument(f"{groups} groups do not divide the {heads} heads of mamba2")
    normed = groups if norm_groups is None else norm_groups
    if inner % normed:
        raise InvalidArgument(f"{normed} norm_groups do not divide the {inner} channels inside mamba2")
    return inner, heads, normed


def steps_in_order(least: float, most: float | None) -> None:
    """Refuse limits of time steps of which the upper one is below the lower one.

    Raises:
        InvalidArgument: they are in the wrong order.
    """
    if most is not None and most < least:
        raise InvalidArgument(f"step_most {most:g} is below step_least {least:g}")


def check_blocks(width: int, blocks: int) -> None:
    """Refuse blocks of an RG-LRU that do not divide its width.

    Raises:
        InvalidArgument: they do not.
    """
    if blocks < 1 or width % blocks:
        raise InvalidArgument(f"rg-lru needs a width that its blocks divide, not {width} in {blocks} blocks")


def conjugate_pairs(mixer: str, state: int, where: str = "") -> int:
    """How many of `state` real numbers' complex pairs are kept. where: goes into the message.

    Raises:
        InvalidArgument: an odd state.
    """
    if state % 2:
        raise InvalidArgument(f"{mixer} keeps pairs of conjugate numbers: state must be even{where}, not {state}")
    return state // 2
