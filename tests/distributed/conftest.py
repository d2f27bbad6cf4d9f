"""One pool of processes for all tests here."""

from collections.abc import Iterator

import pytest
from tests.distributed.pool import Pool


@pytest.fixture(scope="session")
def pool() -> Iterator[Pool]:
    made = Pool()
    yield made
    made.close()
