"""What the processor multiplies in tiles: torch is asked, and the system for its leave."""

import pytest
import torch

from mercer.runtime import processor

NAMES = ("_is_amx_tile_supported", "_init_amx")


@pytest.mark.parametrize(("found", "allowed"), [(True, True), (True, False), (False, True)])
def test_tiles_need_the_instructions_and_the_leave_of_the_system(monkeypatch: pytest.MonkeyPatch, found, allowed):
    asked = []
    monkeypatch.setattr(torch.cpu, NAMES[0], lambda: found, raising=False)
    monkeypatch.setattr(torch.cpu, NAMES[1], lambda: asked.append(1) or allowed, raising=False)
    assert processor.multiplies_tiles.__wrapped__() is (found and allowed)
    assert len(asked) == found  # nobody asks for registers that are not there


@pytest.mark.parametrize("missing", NAMES)
def test_a_torch_that_does_not_say_has_none(monkeypatch: pytest.MonkeyPatch, missing):
    for name in NAMES:
        monkeypatch.setattr(torch.cpu, name, lambda: True, raising=False)
    monkeypatch.delattr(torch.cpu, missing)
    assert processor.multiplies_tiles.__wrapped__() is False
