"""Numbers and nouns that agree."""


def count(number: int, noun: str) -> str:
    """``1 file``, ``2 files``, ``1,000 steps``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")
