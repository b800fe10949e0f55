"""Numbers as reports print them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampaudit.core.text import format_bound, format_bytes, format_number


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0, "0"),
        (0.12345, "0.1235"),
        (999.96, "1000"),
        (1e3, "1,000"),
        (65504.0, "65,504"),
        (65504.5, "65,500"),
        (99999.0, "99,999"),
        (100001.0, "100,000"),
        (9.99e6, "9,990,000"),
        (1e7, "1e+07"),
        (-70000.0, "-70,000"),
    ],
)
def test_a_number_has_four_significant_digits_and_whole_ones_more(value: float, text: str) -> None:
    assert format_number(value) == text


@given(st.floats(min_value=0.0, max_value=1e300))
def test_a_bound_is_not_printed_below_its_value(value: float) -> None:
    shown = float(format_bound(value).replace(",", ""))
    assert value <= shown <= value * 1.0011


def test_a_whole_bound_is_printed_in_full() -> None:
    assert format_bound(65504.0) == "65,504"
    assert format_bound(65504.5) == "65,510"


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1_000, "1 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (16_384_000, "16.4 MB"),
        (999_999_999, "1 GB"),
        (1_500_000_000_000, "1.5 TB"),
        (2**63, "9.22 EB"),
    ],
)
def test_bytes_are_never_printed_with_an_exponent(count: int, text: str) -> None:
    assert format_bytes(count) == text
