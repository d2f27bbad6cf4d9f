"""What every test starts from: one seed, and one thread where several processes share the cores."""

import os
import random

import numpy as np
import pytest
import torch
from hypothesis import settings

SEED = 20250701

# The same examples in every run, so that a failure seen once can be seen again; no deadline, since the first example
# pays for imports and compilation.
settings.register_profile("mercer", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("mercer")


@pytest.fixture(autouse=True, scope="session")
def _one_thread_a_worker() -> None:
    if "PYTEST_XDIST_WORKER" in os.environ:
        torch.set_num_threads(1)


@pytest.fixture(autouse=True)
def _seeded() -> None:
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - for code that draws from numpy's global generator
    torch.manual_seed(SEED)


@pytest.fixture
def generator() -> torch.Generator:
    """A generator of the test's own, for draws that must not depend on what ran before."""
    return torch.Generator().manual_seed(SEED)
