from __future__ import annotations

import html
import itertools
import json
import re
from pathlib import Path

import pytest
from tests.studies import examples

from mercer.studies.records import AnyRecord, OrdersRecord, write_record
from mercer.studies.records.common import Finding, Interval
from mercer.studies.report import numbers, orders, render, write_page
from mercer.studies.report.blocks import Figure
from mercer.studies.report.marks import DARK_BACKGROUND, LIGHT_BACKGROUND, all_colours, contrast, label, mark
from mercer.studies.report.position_marks import position_colours

RECORDS = [
    examples.orders(),
    examples.orders(seeds=3),
    examples.recall(),
    examples.cost(),
    examples.approximation(),
    examples.positions(),
    examples.positions(seeds=3),
]


def words(page: str) -> str:
    """The page without scripts, styles and tags."""
    page = re.sub(r"<(script|style)\b.*?</\1>", " ", page, flags=re.DOTALL)
    return re.sub(r"\s+", " ", html.unescape(re.sub(r"<[^>]+>", " ", page)))


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.study)
def test_the_page_is_one_file_that_the_network_cannot_reach(record: AnyRecord) -> None:
    page = render(record)
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', page)
    assert policy
    assert policy[1].startswith("default-src 'none'")
    assert "http" not in policy[1]
    assert not re.findall(r"<(?:link|img|iframe|script|object|embed)\b[^>]*\b(?:src|href|data)=", page)
    assert "@import" not in page
    assert '<meta name="viewport" content="width=device-width, initial-scale=1">' in page
    assert "prefers-color-scheme: dark" in page
    assert page.count("<!doctype html>") == 1
    assert len(page) < 6_000_000


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.study)
def test_the_page_says_findings_command_and_environment(record: AnyRecord) -> None:
    text = words(render(record))
    for finding in record.findings:
        assert finding.question in text
        assert finding.text in text
        assert finding.verdict in text
    assert record.provenance.command in text
    assert "An <example> & more" in text  # escaped on the way in, itself on the way out
    assert "2.13.0" in text


@pytest.mark.parametrize("record", RECORDS, ids=lambda r: r.study)
def test_every_figure_has_words_and_every_plot_its_place(record: AnyRecord) -> None:
    page = render(record)
    plots = json.loads(re.search(r'<script type="application/json" id="plots">(.*?)</script>', page, re.DOTALL)[1])  # type: ignore[index]
    places = re.findall(r'id="plot-([^"]+)" role="img" aria-label="([^"]+)"', page)
    assert [name for name, _ in places] == list(plots)
    assert len(places) >= 3
    assert all(len(alt) > 60 for _, alt in places)
    assert all(plot["data"] for plot in plots.values())
    assert page.count("<figcaption>") == len(places)


def test_the_table_of_orders_holds_the_numbers() -> None:
    record = examples.orders(seeds=3)
    text = words(render(record))
    for summary in record.summaries:
        assert f"{label(summary.arm)} " in text
        assert numbers.interval(summary.loss) in text
        assert summary.loss is not None
        assert summary.loss.decided
    assert "1 (odd)" in text
    assert "2 (even)" in text
    assert record.corpus.sha256 in text


def test_one_seed_shows_the_spread_of_differences_only() -> None:
    record = examples.orders(seeds=1)
    text = words(render(record))
    for summary in record.summaries:
        assert numbers.interval(summary.loss) not in text
        assert numbers.decimal(summary.loss.mean if summary.loss else None) in text
        assert summary.gap is None or numbers.interval(summary.gap, sign=True) in text


def test_a_page_with_mixers_says_that_sizes_differ() -> None:
    plain = words(render(examples.orders()))
    assert "Every model has the same size" in plain
    assert "Taylor series" in plain
    record = examples.orders()
    other = record.arms[1]
    mixed = other.model_copy(update={"family": "pattern", "normalizer": "none", "order": None})
    larger = [t.model_copy(update={"parameters": 950_000}) if t.arm == other.name else t for t in record.trials]
    update = {"arms": [mixed if arm is other else arm for arm in record.arms]}
    text = words(render(record.model_copy(update=update | {"trials": larger})))
    assert "same size" not in text
    assert "Taylor series" not in text
    assert "with it the number of parameters" in text
    assert "820k to 950k" in text
    assert re.search(rf"{re.escape(label(other.name))} (?:(?!820k).)*? 950k", text)
    equal = words(render(record.model_copy(update=update)))
    assert "number of parameters" not in equal
    assert "950k" not in equal


def test_text_from_the_record_cannot_become_markup() -> None:
    evil = "</script><script>alert(1)</script><b>"
    everywhere = examples.orders().model_dump_json().replace('"taylor2-sum"', json.dumps(evil))
    record = OrdersRecord.model_validate_json(everywhere)
    finding = Finding(question=evil, verdict="undecided", text=evil)
    corpus = record.corpus.model_copy(update={"name": evil})
    page = render(record.model_copy(update={"findings": [finding], "corpus": corpus}))
    assert page.count("alert(1)") > 5
    assert "<script>alert" not in page


def test_an_unfinished_study_says_so() -> None:
    assert "Unfinished." in words(render(examples.orders(finished=False)))
    assert "Unfinished." not in words(render(examples.orders()))
    empty = examples.orders(finished=False).model_copy(update={"trials": [], "summaries": [], "findings": []})
    assert "Unfinished." in words(render(empty))


def test_rendering_again_needs_the_json_alone(tmp_path: Path) -> None:
    path = write_record(examples.orders(), tmp_path / "here")
    page = write_page(path)
    assert page == tmp_path / "here" / "orders.html"
    path.with_suffix(".schema.json").unlink()
    elsewhere = write_page(path, tmp_path / "there" / "page.html")
    assert elsewhere.read_bytes() == page.read_bytes()


def test_colours_can_be_seen_on_both_backgrounds() -> None:
    for colour, background in itertools.product(
        (*all_colours(), *position_colours()), (LIGHT_BACKGROUND, DARK_BACKGROUND)
    ):
        assert contrast(colour, background) >= 3, (colour, background)
    assert contrast("#000000", "#ffffff") == pytest.approx(21)


def test_an_attention_has_one_colour_in_every_figure() -> None:
    record = examples.orders()
    names = {label(arm.name): arm.name for arm in record.arms}
    series = {f"Taylor · {ending}": f"taylor{{}}-{name}" for ending, name in (("L2", "l2"), ("sum", "sum"))}
    found: dict[str, list[str]] = {}
    for section in orders.build(record).sections:
        for trace in (t for part in section.parts if isinstance(part, Figure) for t in part.spec["data"]):
            if pattern := series.get(trace["name"]):
                for order, colour in zip(trace["x"], trace["marker"]["color"], strict=True):
                    found.setdefault(pattern.format(order), []).append(colour)
            else:
                found.setdefault(names[trace["name"]], []).append(trace["marker"]["color"])
    assert {name: set(colours) for name, colours in found.items()} == {
        arm.name: {mark(arm.name).colour} for arm in record.arms
    }
    assert len(found["taylor2-l2"]) == 4


def test_marks_tell_parity_and_normaliser_apart() -> None:
    assert mark("taylor3-l2").symbol == "diamond-open"
    assert mark("taylor4-l2").symbol == "circle"
    assert mark("taylor4-l2").dash != mark("taylor4-sum").dash
    assert mark("softmax") == mark("exp-sum")
    assert mark("exp-l2").dash != mark("exp-l2+gain").dash
    expected = {
        "taylor4-l2": "Taylor 4 · L2",
        "taylor3-signed-sum": "Taylor 3 signed · sum",
        "exp-l2+gain": "Exp · L2 + gain",
        "elu-sum": "elu · sum",
        "linear": "elu · sum",
        "exp-sum": "softmax",
        "power2-identity": "Power 2 · no normaliser",
        "favor256-sum+independent": "FAVOR+ 256 · sum + independent",
        "trig64-signed-sum": "Trigonometric 64 signed · sum",
        "expfeatures-sum": "exp features · sum",
        "exp@64:taylor2-sum": "Exp within 64, Taylor 2 · sum beyond",
    }
    assert {name: label(name) for name in expected} == expected


def test_numbers_as_people_read_them() -> None:
    assert numbers.decimal(-0.5, 2) == "\u22120.50"
    assert numbers.decimal(None) == "–"
    zeros = [numbers.decimal(x, 3, sign) for x in (-0.0004, -0.0, 0.0, 0.0004) for sign in (True, False)]
    assert set(zeros) == {"0.000"}
    assert numbers.decimal(-0.0006, sign=True) == "\u22120.001"
    assert numbers.interval(Interval(mean=-1e-5, low=-3e-5, high=1e-5, count=3), sign=True) == "0.000 ± 0.000"
    assert [numbers.short(x) for x in (0.5, 999.0, 999.9, 1234567.0)] == ["0.5", "999", "1k", "1.23M"]
    assert numbers.short(1.5e11, "FLOP/s") == "150 GFLOP/s"
    assert [numbers.size(x) for x in (0, 1023, 1024, 3 * 2**20)] == ["0 B", "1023 B", "1 KiB", "3 MiB"]
    assert [numbers.duration(x) for x in (2e-9, 4.1e-6, 0.5, 61, 7500)] == [
        "2 ns",
        "4.1 µs",
        "500 ms",
        "1 min 1 s",
        "2 h 5 min",
    ]
    assert numbers.day("2026-01-02T03:04:05+00:00") == "2 January 2026, 03:04 UTC"
