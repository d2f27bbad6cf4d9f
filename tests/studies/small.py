"""Studies small enough for a test: ``python small.py FOLDER`` runs one of orders until it is killed, and
``python small.py FOLDER positions`` one of positions."""

from __future__ import annotations

import random
import sys
from pathlib import Path
from typing import Any

from mercer.studies import orders, positions

MODEL = {"dim": 16, "layers": 1, "heads": 2}
TRAINING = {"batch": 2, "length": 16, "learning_rate": 3e-3, "eval_windows": 6, "keep": 1}
ATTENTIONS = ("softmax", "exp-l2", "taylor2-l2")
STEPS = 24
SCHEMES = ("rotary", "rotary+yarn", "alibi")
POSITIONS: dict[str, Any] = {"MODEL": MODEL, "TRAINING": TRAINING, "EXTENSION": 4, "WINDOWS": 8, "BLOCKS": 4}


def make_text(folder: Path) -> Path:
    """Nine files of sentences that a model can learn something from."""
    folder.mkdir(parents=True, exist_ok=True)
    draw = random.Random(0)
    words = ["kernel", "feature", "state", "value", "query", "key", "norm"]
    for place in range(9):
        text = " ".join(draw.choice(words) for _ in range(400))
        (folder / f"part{place}.txt").write_text(text)
    return folder


def shrink() -> None:
    """Make the studies small. Only for processes and tests that end with it."""
    orders.MODEL, orders.TRAINING = MODEL, TRAINING
    for name, value in POSITIONS.items():
        setattr(positions, name, value)


if __name__ == "__main__":
    shrink()
    root = Path(sys.argv[1])
    common: dict[str, Any] = {"text": [root / "text"], "seeds": 2, "steps": STEPS, "device": "cpu"}
    if sys.argv[2:] == ["positions"]:
        positions.run("standard", root / "study", positions=SCHEMES, **common)
    else:
        orders.run("standard", root / "study", attentions=ATTENTIONS, **common)
