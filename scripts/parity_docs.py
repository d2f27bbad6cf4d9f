"""Write docs/parity.md from what the tests of checkpoints measure: `python scripts/parity_docs.py` (some minutes)."""

import json
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ET
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parent.parent
PAGE = ROOT / "docs" / "parity.md"
TEST = "test_a_loaded_model_is_the_model_that_was_saved"
COLUMNS = {
    "logits": "answer",
    "answer": "answer",
    "hidden": "hidden states",
    "pooled": "pooled",
    "cached": "in pieces",
    "steps": "in pieces",
    "left": "padding left",
    "right": "padding right",
    "gradients": "gradients",
    "written": "written",
}
"""Of each measurement the column."""
ORDER = ("answer", "hidden states", "in pieces", "padding left", "padding right", "gradients", "written")
GROUPS = {
    "test_decoders": "Decoder language models",
    "test_encoders": "Encoders",
    "test_seq2seq": "Encoder-decoders",
    "test_vision": "Vision",
    "test_decision": "Decisions",
}
FAMILIES = {"test_vision": "vit, ", "test_decision": "decision_transformer, "}
"""What the names of models lack in files of one family."""
HEAD = """# Parity with transformers

The largest difference between a model of transformers {version} and the same model here, as a share of the largest
number compared, in float32. The models are tiny, with every parameter drawn again (matrices N(0, 0.3²), and less in
T5 and Switch, whose scores are not divided by sqrt(d), and in Jamba and Zamba, where layers without a residual between
them multiply what is rounded; norms and biases moved by N(0, 0.1²)), and were saved before they computed anything. The
tests of `tests/checkpoints` ask for 1e-5 in every column; this page is what they measured,
written by `scripts/parity_docs.py`.

- *answer*: logits, or hidden states of a bare body, at all positions. *hidden states*: of all layers but the last.
- *in pieces*: the same from states, tokens read in pieces of 20, 1, 1, 7, ... (7, 1, 1, 3, ... after an encoder).
- *padding*: the answer at the real tokens of a batch with 5 others before or behind, beside the reference without any.
- *gradients*: of every tensor on the disk; what is smaller than a tenth of the largest gradient is compared with that.
- *written*: what transformers computes with the checkpoint that is written back.
"""


def measured() -> dict[str, dict[str, dict[str, float]]]:
    """Of each file of tests, of each model, the errors."""
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        command = ["-m", "pytest", "tests/checkpoints", "-q", "-k", TEST, "-o", "junit_family=xunit1"]
        subprocess.run([sys.executable, *command, f"--junitxml={report}"], cwd=ROOT, check=True)
        tree = ET.parse(report)
    found: dict[str, dict[str, dict[str, float]]] = {group: {} for group in GROUPS}
    for case in tree.iter("testcase"):
        name = case.attrib["name"].removeprefix(f"{TEST}[").removesuffix("]")
        for value in case.iter("property"):
            if value.attrib["name"] == "errors":
                found[case.attrib["classname"].rpartition(".")[2]][name] = json.loads(value.attrib["value"])
    return found


def page(found: dict[str, dict[str, dict[str, float]]]) -> str:
    """The page as text."""
    lines = [HEAD.format(version=version("transformers"))]
    for group, title in GROUPS.items():
        lines += [f"## {title}", "", f"| | {' | '.join(ORDER)} |", "|---" * (len(ORDER) + 1) + "|"]
        for name, errors in found[group].items():
            by_column: dict[str, float] = {}
            for kind, error in errors.items():
                column = COLUMNS[kind]
                by_column[column] = max(error, by_column.get(column, 0.0))
            cells = [f"{by_column[column]:.1e}" if column in by_column else "" for column in ORDER]
            lines.append(f"| {FAMILIES.get(group, '')}{name} | {' | '.join(cells)} |")
        lines.append("")
    return "\n".join(lines)


if __name__ == "__main__":
    PAGE.write_text(page(measured()), encoding="utf-8")
    print(f"wrote {PAGE}")
