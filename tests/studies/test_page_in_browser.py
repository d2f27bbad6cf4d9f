"""The pages in a real browser: drawn without a network, and no wider than the screen of a phone."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.studies import examples

from mercer.studies.records import AnyRecord
from mercer.studies.report import render

# A browser's window has a least width, a frame inside has not.
FRAME = """<!doctype html><output></output>
<iframe src="page.html" width="{width}" height="1200" style="border: 0"></iframe>
<script>addEventListener("message", (event) => document.querySelector("output").textContent = event.data);</script>
"""
# Runs in the page after it has drawn; sends what it found to the frame around it.
PROBE = """
<script>
const problems = [];
addEventListener("error", (event) => problems.push(event.message));
addEventListener("securitypolicyviolation", (event) => problems.push(event.violatedDirective));
</script>
"""
MEASURE = """
<script>
setTimeout(() => {
  const plots = [...document.querySelectorAll(".plot")];
  const press = document.querySelector(".legend button");
  const shown = () => document.querySelectorAll(".scatterlayer .trace").length;
  const before = shown();
  press.click();
  setTimeout(() => {
    const found = {
      width: innerWidth, client: document.documentElement.clientWidth, scroll: document.documentElement.scrollWidth,
      drawn: plots.filter((plot) => plot.querySelector(".scatterlayer .trace")).length, plots: plots.length,
      widest: Math.max(...plots.map((plot) => plot.querySelector("svg").getBoundingClientRect().width)),
      requests: performance.getEntriesByType("resource").map((entry) => entry.name),
      hidden: before - shown(), pressed: press.getAttribute("aria-pressed"), problems,
      traces: press.dataset.traces.split(" ").length,
    };
    parent.postMessage(JSON.stringify(found), "*");
  }, 1000);
}, 3000);
</script>
"""


@pytest.mark.browser
@pytest.mark.parametrize("width", [1280, 390])
@pytest.mark.parametrize(
    "record",
    [examples.orders(), examples.recall(), examples.cost(), examples.approximation(), examples.positions()],
    ids=lambda r: r.study,
)
def test_the_page_draws_offline_and_fits(
    record: AnyRecord, width: int, dump: Callable[[Path, int], str], tmp_path: Path
) -> None:
    page = tmp_path / "page.html"
    page.write_text(render(record).replace("<head>", "<head>" + PROBE, 1).replace("</body>", MEASURE + "</body>", 1))
    frame = tmp_path / "frame.html"
    frame.write_text(FRAME.format(width=width))
    document = dump(frame, width + 50)
    found = json.loads(html.unescape(re.search(r"<output>(.+?)</output>", document, re.DOTALL)[1]))  # type: ignore[index]
    assert found["width"] == width
    assert found["problems"] == []
    assert found["requests"] == []
    assert found["drawn"] == found["plots"] >= 3
    assert found["scroll"] <= found["client"], "the page scrolls sideways"
    assert found["widest"] <= found["client"]
    assert found["hidden"] == found["traces"] >= 1
    assert found["pressed"] == "false"
