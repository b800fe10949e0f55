"""The values of literal expressions, compared with what Python itself computes."""

from __future__ import annotations

import ast
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ampaudit.linter.rules.constants import number_of
from tests.linter.examples import lint

NUMBERS = st.one_of(
    st.integers(min_value=0, max_value=10**15).map(str),
    st.floats(min_value=0, allow_nan=False, allow_infinity=False).map(repr),
    st.integers(min_value=310, max_value=500).map(lambda digits: "9" * digits),
)
EXPRESSIONS = st.recursive(
    NUMBERS,
    lambda inner: st.one_of(
        inner.map(lambda text: f"-({text})"),
        st.tuples(inner, st.sampled_from(["*", "**"]), inner).map(lambda t: f"({t[0]}) {t[1]} ({t[2]})"),
    ),
    max_leaves=4,
)


@given(EXPRESSIONS)
def test_any_literal_expression_has_a_value_or_none(text: str) -> None:
    value = number_of(ast.parse(text, mode="eval").body)
    assert value is None or isinstance(value, float)


@given(st.integers(-100, 100), st.integers(1, 20), st.integers(-1000, 1000))
def test_the_value_is_that_of_python(base: int, exponent: int, factor: int) -> None:
    text = f"({base}) ** {exponent} * ({factor})"
    value = number_of(ast.parse(text, mode="eval").body)
    if base and value is not None:
        assert value == pytest.approx(float(base**exponent * factor), rel=1e-12)


@pytest.mark.parametrize("number", ["9" * 400, "(-2) ** 0.5", "(-2) ** -0.5", "1e-300 ** -2"])
def test_numbers_that_are_no_floats_do_not_end_the_reading(number: str) -> None:
    script = (
        "import torch\n\n\nclass M(torch.nn.Module):\n    def forward(self, x, mask):\n"
        f"        return x.masked_fill(mask, {number}) + 1e-9\n"
    )
    assert not lint(script).unread


def test_a_larger_integer_is_infinite() -> None:
    assert number_of(ast.parse("-" + "9" * 400, mode="eval").body) == -math.inf
