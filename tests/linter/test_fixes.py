"""Fixes resolve their findings, keep the layout, and are offered only where they are safe."""

from __future__ import annotations

import ast
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.linter.examples import BAD, FIXABLE, GOOD, PAGES, codes, lint

CLI = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.parametrize("name", BAD)
def test_a_repair_relints_clean_and_is_idempotent(name: str) -> None:
    before = lint(BAD[name])
    offered = any(finding.fixable for finding in before.findings)
    fixed = lint(BAD[name], fix=True)
    if not offered:
        assert fixed.after == BAD[name]
        return
    assert fixed.after != BAD[name]
    by_hand = [finding.code for finding in before.findings if not finding.fixable]
    assert [finding.code for finding in fixed.findings] == by_hand
    assert fixed.fixed == len(before.findings) - len(by_hand)
    ast.parse(fixed.after)
    again = lint(fixed.after, fix=True)
    assert again.after == fixed.after
    assert again.fixed == 0


def test_repairs_are_offered_where_they_are_safe() -> None:
    found = {code: lint(page.bad.code).findings for code, page in PAGES.items()}
    safe = {code for code, findings in found.items() if any(f.fixable for f in findings)}
    unsafe = {code for code, findings in found.items() if any(f.fixable_unsafely for f in findings)}
    assert safe | unsafe == FIXABLE
    assert unsafe == {"AMP850"}  # its decorators need a recent torch


@pytest.mark.parametrize("code", sorted(FIXABLE - {"AMP818", "AMP820", "AMP836"}))
def test_a_repair_makes_the_good_example_of_the_page(code: str) -> None:
    assert lint(PAGES[code].bad.code, fix=True, unsafe=True).after == PAGES[code].good.code


def test_a_repair_replaces_no_entry_of_a_checkpoint() -> None:
    text = BAD["AMP820"]
    assert lint(text, fix=True).fixed == 1
    saved = text.replace('"optimizer":', '"scaler": settings, "optimizer":')
    assert saved != text
    assert {f.code for f in lint(saved).findings} == {"AMP820"}
    assert lint(saved, fix=True).after == saved


def test_a_repair_keeps_comments_and_layout() -> None:
    text = BAD["AMP807"].replace(
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "        # keep the steps small\n"
        "        torch.nn.utils.clip_grad_norm_( model.parameters(),1.0 )  # one",
    )
    wanted = text.replace(
        "        # keep the steps small\n",
        "        # keep the steps small\n        scaler.unscale_(optimizer)\n",
    )
    assert lint(text, fix=True).after == wanted


def test_a_name_is_not_written_where_it_is_not_visible() -> None:
    text = (
        GOOD["AMP807"]
        .replace("        scaler.unscale_(optimizer)\n", "")
        .replace(
            "        scaler.step(optimizer)\n",
            "        for each in optimizers:\n            scaler.step(each)\n",
        )
    )
    assert codes(text) == ["AMP807"]
    assert lint(text, fix=True).after == text
    helper = (
        BAD["AMP802"].replace("        loss.backward()", "        back(loss)")
        + "\n\ndef back(loss):\n    loss.backward()\n"
    )
    assert codes(helper) == ["AMP802"]
    assert lint(helper, fix=True).after == helper


def test_a_second_backward_of_a_scaled_loss_is_not_scaled_as_well() -> None:
    text = BAD["AMP802"].replace(
        "        loss.backward()", "        scaler.scale(loss).backward()\n        loss.backward()"
    )
    assert [(f.code, f.fixable) for f in lint(text).findings] == [("AMP802", False)]


def test_unscaling_is_not_put_into_a_loop_of_its_own() -> None:
    text = BAD["AMP807"].replace(
        "        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)",
        "        for part in model.children():\n"
        "            torch.nn.utils.clip_grad_norm_(part.parameters(), 1.0)",
    )
    assert [(f.code, f.fixable) for f in lint(text).findings] == [("AMP807", False)]
    assert lint(text, fix=True).after == text


def test_a_block_is_not_ended_before_what_needs_it() -> None:
    text = BAD["AMP840"].replace(
        "            scaler.update()",
        "            scaler.update()\n            score = criterion(model(x), y)",
    )
    assert [(f.code, f.fixable) for f in lint(text).findings] == [("AMP840", False)]


@pytest.mark.parametrize("line", ["gram = weight @ weight.T", "square = weight ** 2", "gram @= weight"])
def test_a_block_is_not_ended_before_operators_that_autocast_casts(line: str) -> None:
    text = BAD["AMP840"].replace(
        "            scaler.update()", f"            scaler.update()\n            {line}"
    )
    assert [(f.code, f.fixable) for f in lint(text).findings] == [("AMP840", False)]


def test_a_scaler_with_enabled_by_position_is_changed_by_hand() -> None:
    text = BAD["AMP818"].replace('GradScaler("cuda")', 'GradScaler("cuda", 65536.0, 2.0, 0.5, 2000, True)')
    assert text != BAD["AMP818"]
    assert [(f.code, f.fixable) for f in lint(text).findings] == [("AMP818", False)]


@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "latin-1"])
def test_encodings_and_line_ends_survive_a_repair(
    tmp_path: Path, cli: CLI, newline: str, encoding: str
) -> None:
    cookie = "# -*- coding: latin-1 -*-\n" if encoding == "latin-1" else ""
    text = f"{cookie}# é\n{BAD['AMP803']}"
    path = tmp_path / "train.py"
    path.write_bytes(text.replace("\n", newline).encode(encoding))
    path.chmod(0o750)
    done = cli("lint", "--fix", path)
    if newline == "\r":  # read, but not repaired; and no encoding can be declared in its first line
        assert done.returncode == (2 if encoding == "latin-1" else 1)
        assert path.read_bytes() == text.replace("\n", newline).encode(encoding)
        return
    assert done.returncode == 0, done.stdout
    wanted = text.replace("        optimizer.step()", "        scaler.step(optimizer)")
    assert path.read_bytes() == wanted.replace("\n", newline).encode(encoding)
    assert path.stat().st_mode & 0o777 == 0o750
