"""A fix is safe only where its names are bound on every path."""

from __future__ import annotations

import itertools
from collections.abc import Callable

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from ampaudit.linter.diagnostic import Fix
from ampaudit.linter.flow.script import read_script
from ampaudit.linter.repair import is_bound
from tests.linter.examples import BAD, lint


def block(depth: int) -> st.SearchStrategy[list[str]]:
    """Lines of a block; ``c()`` is a condition that may be true or false, ``HERE`` reads the name."""
    simple = st.sampled_from(["x = 1", "HERE", "c()", "fail()", "return", "import os as x", "y = 2"])
    if depth == 0:
        return st.lists(simple.map(lambda line: [line]), min_size=1, max_size=3).map(flat)
    inner = block(depth - 1)
    compound = st.one_of(
        inner.map(lambda b: ["if c():", *indented(b)]),
        st.tuples(inner, inner).map(lambda p: ["if c():", *indented(p[0]), "else:", *indented(p[1])]),
        st.tuples(inner, inner).map(
            lambda p: ["try:", *indented(p[0]), "except ValueError:", *indented(p[1])]
        ),
        st.tuples(inner, inner).map(lambda p: ["try:", *indented(p[0]), "finally:", *indented(p[1])]),
        inner.map(lambda b: ["for x in some():", *indented(b)]),
        inner.map(lambda b: ["while c():", *indented(b), *indented(["break"])]),
        inner.map(lambda b: ["with cm() as x:", *indented(b)]),
        inner.map(lambda b: ["with cm():", *indented(b)]),
    )
    return st.lists(st.one_of(simple.map(lambda line: [line]), compound), min_size=1, max_size=4).map(flat)


def flat(blocks: list[list[str]]) -> list[str]:
    return [line for lines in blocks for line in lines]


def indented(lines: list[str]) -> list[str]:
    return ["    " + line for line in lines]


class Swallows:
    """A context manager that goes on behind the block after some exceptions, like ``suppress``."""

    def __enter__(self) -> int:
        return 1

    def __exit__(self, *error: object) -> bool:
        return False


def lines_read_unbound(lines: list[str]) -> set[int]:
    """Run a function along all paths; return the lines that read ``x`` before it is bound."""
    found: set[int] = set()
    text = "\n".join(
        line.replace("HERE", f"here({number}, locals())") for number, line in enumerate(lines, 1)
    )
    code = compile(text, "generated", "exec")
    for answers in itertools.product((True, False), repeat=7):
        given = iter(answers)

        def answer(given: object = given) -> bool:
            return next(given, False)  # type: ignore[call-overload]

        def fail(answer: Callable[[], bool] = answer) -> None:
            if answer():
                raise ValueError

        def here(number: int, names: dict[str, object]) -> None:
            if "x" not in names:
                found.add(number)

        def some(answer: Callable[[], bool] = answer) -> list[int]:
            return [1] if answer() else []

        names = {"c": answer, "fail": fail, "here": here, "some": some, "cm": Swallows}
        exec(code, names)
        try:
            names["f"]()  # type: ignore[operator]
        except (ValueError, UnboundLocalError):
            continue
    return found


@settings(max_examples=400, deadline=None)
@given(block(2))
@example(["for x in some():", "    y = 2", "HERE"])
@example(["try:", "    fail()", "    x = 1", "except ValueError:", "    y = 2", "HERE"])
def test_a_name_that_is_called_bound_is_bound_on_every_path(body: list[str]) -> None:
    lines = ["def f():", *indented(body), "    x = 3"]  # which makes it a local name everywhere
    script = read_script("\n".join(lines))
    unbound = lines_read_unbound(lines)
    for number, line in enumerate(lines, 1):
        if "HERE" in line and number in unbound:
            assert not is_bound(script, number, "x")


@pytest.mark.parametrize(
    ("text", "name", "bound"),
    [
        ("def f(scaler):\n    HERE", "scaler", True),
        ("def f():\n    HERE", "scaler", False),
        ("scaler = 1\n\n\ndef f():\n    HERE", "scaler", True),
        ("def f():\n    HERE\n\n\nscaler = 1", "scaler", True),
        ("if a:\n    scaler = 1\nHERE", "scaler", False),
        ("if a:\n    scaler = 1\nif a:\n    HERE", "scaler", False),
        ("if a:\n    scaler = 1\nif a:\n    HERE\n    scaler.update()", "scaler", True),
        ("other = [scaler for scaler in scalers]\nHERE", "scaler", False),
        ("def f(other=lambda scaler: scaler):\n    HERE", "scaler", False),
        ("try:\n    pass\nexcept E:\n    scaler.update()\nHERE", "scaler", False),
        ("match a:\n    case 1:\n        scaler.update()\nHERE", "scaler", False),
        ("for scaler in scalers:\n    HERE", "scaler", True),
        ("class A:\n    scaler = 1\n\n    def f(self):\n        HERE", "scaler", False),
        ("def f(self):\n    HERE\n    self.scaler.update()", "self.scaler", True),
        ("def f(self):\n    HERE\n    if a:\n        self.scaler.update()", "self.scaler", False),
        ("def f(self):\n    HERE", "self.scaler", False),
        ("def f():\n    HERE\n    scaler = 1\n    scaler.update()", "scaler", False),
        ("import torch\n\n\ndef f():\n    HERE", "torch", True),
    ],
)
def test_where_a_name_is_bound(text: str, name: str, bound: bool) -> None:
    line = text.split("HERE")[0].count("\n") + 1
    assert is_bound(read_script(text.replace("HERE", "pass")), line, name) is bound


def test_a_repair_that_leaves_another_mistake_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    text = BAD["AMP803"]
    assert lint(text, fix=True).after != text

    def breaks(text: str, fixes: object) -> tuple[str, set[Fix]]:
        del fixes
        new = "        scaler.update()\n        scaler.update()"
        return text.replace("        optimizer.step()", new), set()

    monkeypatch.setattr("ampaudit.linter.fixes.apply_fixes", breaks)
    linted = lint(text, fix=True)
    assert linted.after == text
    assert linted.fixed == 0


def test_one_bad_repair_does_not_hold_up_another(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampaudit.linter import fixes

    text = BAD["AMP803"] + "\n\n" + BAD["AMP809"].replace("def train", "def train_again")
    applied = fixes.apply_fixes

    def breaks_one(text: str, given: list[Fix]) -> tuple[str, set[Fix]]:
        bad = any(fix.kind == "step by scaler" for fix in given)
        changed, found = applied(text, given)
        more = BAD["AMP815"].replace("def train", "def more")
        return f"{changed}\n\n{more}" if bad else changed, found

    good = lint(text, fix=True)
    monkeypatch.setattr("ampaudit.linter.fixes.apply_fixes", breaks_one)
    linted = lint(text, fix=True)
    assert 0 < linted.fixed < good.fixed
    assert "optimizer.step()" in linted.after
    assert "def more" not in linted.after
