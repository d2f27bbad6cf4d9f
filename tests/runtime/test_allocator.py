"""The allocator's settings: what they report, when they keep still, and that they remove the page faults."""

import json
import os
import platform
import subprocess
import sys

import pytest

from mercer.runtime import allocator as module
from mercer.runtime.allocator import Allocator, allocator, tune

GLIBC = sys.platform.startswith("linux") and platform.libc_ver()[0] == "glibc"
needs_glibc = pytest.mark.skipif(not GLIBC, reason="the C library is not glibc")


def fresh(*lines: str, **variables: str) -> str:
    """The output of these lines in a new interpreter whose environment says nothing of malloc but `variables`."""
    clean = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith("MALLOC_") and name not in ("MERCER_MALLOC", "GLIBC_TUNABLES", "LD_PRELOAD")
    }
    code = "\n".join(["from mercer.runtime.allocator import allocator, tune", *lines])
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True, env=clean | variables).stdout


@needs_glibc
def test_it_says_what_it_did_and_does_it_once() -> None:
    out = fresh(
        "import dataclasses, json",
        "assert not allocator().tuned",
        "first = tune()",
        "assert tune() is first and allocator() is first",
        "print(json.dumps(dataclasses.asdict(first)))",
    )
    state = json.loads(out)
    assert state["tuned"]
    assert {"M_TRIM_THRESHOLD", "M_TOP_PAD"} < set(state["settings"])


@needs_glibc
@pytest.mark.parametrize(
    ("variables", "reason"),
    [
        ({"MERCER_MALLOC": "0"}, "switched off by MERCER_MALLOC=0"),
        ({"MALLOC_TOP_PAD_": "4096"}, "already set by MALLOC_TOP_PAD_"),
        ({"GLIBC_TUNABLES": "glibc.malloc.trim_threshold=131072"}, "already set by GLIBC_TUNABLES"),
    ],
)
def test_it_leaves_alone_what_the_user_decided(variables: dict[str, str], reason: str) -> None:
    out = fresh("state = tune()", "print(state.tuned, len(state.settings), state.reason)", **variables)
    assert out.startswith("False 0 ")
    assert reason in out


def test_it_does_nothing_without_glibc(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_done", None)
    monkeypatch.delenv("MERCER_MALLOC", raising=False)
    monkeypatch.setattr(platform, "libc_ver", lambda: ("", ""))
    monkeypatch.setattr(module, "_apply", lambda _: pytest.fail("mallopt was called"))
    state = tune()
    assert not state.tuned
    assert "not glibc" in state.reason


class OldLibrary:
    """A C library that refuses some parameters."""

    def __init__(self, *refused: int) -> None:
        self.refused = refused

    def mallopt(self, number: int, _value: int) -> int:
        return int(number not in self.refused)


def test_a_capped_threshold_turns_the_mappings_off() -> None:
    state = module._apply(OldLibrary(-3))
    assert state.tuned
    assert state.settings["M_MMAP_MAX"] == 0
    assert "M_MMAP_THRESHOLD" not in state.settings


def test_a_refusal_is_reported() -> None:
    state = module._apply(OldLibrary(-1))
    assert not state.tuned
    assert "M_TRIM_THRESHOLD" in state.reason
    assert "M_TOP_PAD" in state.settings


def test_the_state_without_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_done", None)
    assert allocator() == Allocator(False, "mercer.runtime.allocator.tune was not called in this process")


@needs_glibc
def test_it_removes_the_page_faults() -> None:
    """Taking and freeing 64 MiB again and again: 16,384 faults a time without, none after the first with it."""
    lines = (
        "tune()",
        "import resource, numpy",
        "def work():",
        "    for _ in range(5):",
        "        numpy.ones(8 << 20)",
        "work()",
        "before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt",
        "work()",
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)",
    )
    assert int(fresh(*lines)) < 1000
    # Transparent huge pages make fewer faults of the same work, hence no exact number here.
    assert int(fresh(*lines, MERCER_MALLOC="0")) > 10 * max(1, int(fresh(*lines)))
