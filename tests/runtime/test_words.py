import pytest

from mercer.runtime import words


@pytest.mark.parametrize(
    ("number", "seconds", "told"), [(1204, 1, "1,204"), (25, 2, "12"), (3, 2, "1.5"), (256, 595, "0.43"), (0, 1, "0")]
)
def test_rates_keep_two_digits(number, seconds, told):
    assert words.rate(number, seconds) == told


def test_no_time_is_not_divided_by():
    assert words.rate(1, 0) == "1,000,000,000"
