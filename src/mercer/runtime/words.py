"""Numbers and nouns that agree, and words in a row."""

from collections.abc import Sequence


def count(number: int, noun: str) -> str:
    """``1 file``, ``2 files``, ``1,000 steps``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def rate(number: int, seconds: float) -> str:
    """``1,204``, ``12`` or ``0.43``: how many a second, with two digits at least."""
    value = number / max(seconds, 1e-9)
    return f"{value:,.0f}" if value >= 10 else f"{value:.1f}" if value >= 1 else f"{value:.2g}"


def listed(words: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return ", ".join(words) if len(words) < 2 else f"{', '.join(words[:-1])} and {words[-1]}"
