"""From the name of a device to the device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from mercer.errors import InvalidArgument

if TYPE_CHECKING:
    import torch


def find_device(name: str) -> torch.device:
    """The device of that name; "auto" is a CUDA device if there is one, else the CPU.

    Raises:
        InvalidArgument: it is unknown or not usable here.
    """
    import torch

    cuda = torch.cuda.is_available()
    if name == "auto":
        return torch.device("cuda" if cuda else "cpu")
    try:
        device = torch.device(name)
        if device.type == "meta":  # has no numbers
            raise RuntimeError
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError) as error:
        usable = "'auto', 'cpu' or 'cuda'" if cuda else "'auto' or 'cpu'"
        raise InvalidArgument(f"device {name!r} is not usable here; use {usable}") from error
    return device
