"""Files that cannot be read or parsed, large files, and arbitrary scripts."""

from __future__ import annotations

import ast
import codecs
import encodings.aliases
import re
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any, cast

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampaudit.linter.diagnostic import Mistake
from ampaudit.linter.flow.events import ScriptFollowed
from ampaudit.linter.flow.interpreter import Interpreter, LintRule
from ampaudit.linter.linting import lint_file
from ampaudit.linter.rules.rule import RULES
from ampaudit.linter.selection import RuleSelection
from ampaudit.linter.source_text import Unreadable, decode
from tests.linter.corpora import Script
from tests.linter.examples import BAD, CORRECT, lint


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"def f(:\n    pass\nautocast\n", "not valid Python"),
        (b"print 'autocast'\n", "(Python 2?)"),
        (b"\x00\x01autocast\x00", "a binary file"),
        ("autocast = 1".encode("utf-16"), "UTF-16"),
        (b"# -*- coding: no-such -*-\nautocast\n", "encoding"),
        (b"# autocast \xff\xfe\n", "encoding"),
        (b"autocast = " + b"(" * 500 + b")" * 500, "nested|not valid Python"),
        (b"autocast = " + b"-" * 50_000 + b"1", "nested"),
        (b"x = 1 " + b"+ 1 " * 20_000 + b"  # autocast\n", "nested|^$"),
        (b"x = 1\n" * 2_000_000, "larger than"),
    ],
)
def test_what_cannot_be_read_is_one_line(tmp_path: Path, content: bytes, reason: str) -> None:
    path = tmp_path / "odd.py"
    path.write_bytes(content)
    linted = lint_file(path, RuleSelection())
    if not re.search(reason, ""):
        assert linted.unread
    for unread in linted.unread:
        assert re.search(reason.replace("(Python 2?)", r"\(Python 2\?\)"), unread.reason), unread.reason
        assert "\n" not in unread.reason
        assert "internal error" not in unread.reason


def test_a_rule_that_crashes_is_reported_with_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(_: Interpreter, followed: ScriptFollowed) -> Iterator[Mistake]:
        raise ValueError(f"on purpose, {len(followed.events)} events")
        yield

    monkeypatch.setitem(cast("dict[type, Any]", RULES), ScriptFollowed, [LintRule("AMP801", broken, False)])
    (unread,) = lint(CORRECT[0].source).unread
    assert re.search(
        r"internal error: ValueError: on purpose, .* \(test_linting\.py, line \d+\)", unread.reason
    )


def test_a_file_may_declare_any_codec_that_python_knows() -> None:
    """Some raise what no text encoding raises, such as ``undefined`` and ``punycode``."""
    for name in sorted({*encodings.aliases.aliases.values(), "undefined", "punycode", "idna"}):
        source = b"# -*- coding: " + name.encode() + b" -*-\nx = '\xc3\xa9\x80'\n"
        with suppress(Unreadable):
            text, encoding = decode(source)
            assert isinstance(text, str)
            assert codecs.lookup(encoding)


def test_a_megabyte_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    filler = "".join(
        f"def helper_{i}(a, b):\n    if a:\n        return b + {i}\n    return a\n\n\n" for i in range(14_000)
    )
    path.write_text(filler + BAD["AMP803"])
    assert path.stat().st_size > 1_000_000
    assert [f.code for f in lint_file(path, RuleSelection()).findings] == ["AMP803"]


def test_nothing_is_ever_run(tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    text = f"open({str(marker)!r}, 'w').close()\n" + BAD["AMP803"] + "\ntrain(None, [], None, None)\n"
    path = tmp_path / "evil.py"
    path.write_text(text)
    assert [f.code for f in lint_file(path, RuleSelection(), fix=True).findings] == []
    assert not marker.exists()


PARTS = st.sampled_from(
    """for x in y:|while True:|if a:|else:|try:|except E:|finally:|with c:|def f(self):|class C(B):
return loss|continue|break|pass|match x:|case 1:|loss.backward()|scaler.scale(loss).backward()
scaler.step(optimizer)|lambda: 0|optimizer.step()|scaler.update()|x = yield|async with c:
await x|scaler.unscale_(optimizer)|del scaler|global scaler|self.scaler = GradScaler()
x: int = 1|x += loss|raise E|a, *b = c|[scaler for scaler in x]|@autocast()|assert scaler
with autocast():|scaler = None|f(scaler)|f(*a, **b)|x[0] = -1e9|type X = int
import torch.cuda.amp as amp|print(f'{loss}')|model.half()
torch.save({'o': optimizer.state_dict()})|p.grad.norm()|from torch.cuda.amp import *""".replace(
        "\n", "|"
    ).split("|")
)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(PARTS, st.integers(0, 5)), max_size=14))
def test_no_script_makes_it_stumble(parts: list[tuple[str, int]]) -> None:
    text = "\n".join("    " * depth + line for line, depth in parts) + "\n"
    for fix in (False, True):
        linted = lint(text, fix=fix)
        assert not any("internal error" in unread.reason for unread in linted.unread), linted.unread


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CORRECT), st.data())
def test_correct_loops_without_some_lines_make_no_trouble(script: Script, data: st.DataObject) -> None:
    lines = script.source.splitlines()
    keep = data.draw(st.lists(st.booleans(), min_size=len(lines), max_size=len(lines)))
    text = "\n".join(line for line, kept in zip(lines, keep, strict=True) if kept) + "\n"
    once = lint(text, fix=True)
    assert not any("internal error" in unread.reason for unread in once.unread)
    if not once.unread and once.after != text:
        ast.parse(once.after)
        assert lint(once.after, fix=True).after == once.after
