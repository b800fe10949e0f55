"""What the linter finds, what it leaves alone, what it repairs; and every kind of file it may meet."""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ampaudit.core.errors import UsageError
from ampaudit.lint.linting import LintedFile, RuleSelection, lint_file, lint_files, lint_text
from tests.lint.pages import PAGES, REPAIRED
from tests.lint.twins import TWINS, script

CLI = Callable[..., subprocess.CompletedProcess[str]]
CORRECT = sorted((Path(__file__).parent / "correct").glob("*.py"))
BAD = {code: page.bad.code for code, page in PAGES.items()} | {
    f"{code} again": script(template, bad) for code, (template, bad, _) in TWINS.items()
}
GOOD = {code: page.good.code for code, page in PAGES.items()} | {
    f"{code} again": script(template, good) for code, (template, _, good) in TWINS.items()
}
# a repair may only be offered where it was thought through; here it is made


def lint(text: str, name: str = "train.py", *, fix: bool = False) -> LintedFile:
    return lint_text(text, name, RuleSelection(), fix=fix)


def codes(text: str, name: str = "train.py") -> list[str]:
    found = lint(text, name)
    assert not found.unread, found.unread
    return [finding.code for finding in found.findings if finding.suppressed is None]


# the twins


def test_there_are_twins_for_every_code() -> None:
    assert len(PAGES) >= 30
    assert set(PAGES) == set(TWINS)


@pytest.mark.parametrize("name", BAD)
def test_a_bad_twin_is_found_and_nothing_else(name: str) -> None:
    code = name.split()[0]
    findings = lint(BAD[name]).findings
    assert {finding.code for finding in findings} == {code}
    assert findings[0].severity == PAGES[code].severity
    lines = BAD[name].split("\n")
    for finding in findings:
        assert finding.source == lines[finding.line - 1]
        assert 1 <= finding.column <= len(finding.source) + 1


@pytest.mark.parametrize("name", GOOD)
def test_a_good_twin_is_silent(name: str) -> None:
    assert codes(GOOD[name]) == []


# correct loops


def test_the_corpus_is_large_and_in_many_styles() -> None:
    assert len(CORRECT) >= 60
    texts = "\n".join(path.read_text(encoding="utf-8") for path in CORRECT)
    for style in (
        "accelerate",
        "lightning",
        "deepspeed",
        "timm",
        "nn.parallel",
        "ignite",
        "GPT",
        "AMPTrainer",
    ):
        assert style in texts


@pytest.mark.parametrize("path", CORRECT, ids=lambda path: path.stem)
def test_a_correct_loop_raises_no_alarm(path: Path) -> None:
    assert codes(path.read_text(encoding="utf-8")) == []


SCALER = r"((?:\w+\.)?_?\w*scaler\w*)"
# what a slip changes, and what must then be said; the least share of the files where it must be
SLIPS = {
    "AMP802": (rf"{SCALER}\.scale\((\w[\w.]*)\)\.backward\(", r"\2.backward(", 0.85),
    "AMP803": (rf"{SCALER}\.step\(([\w.]+)\)", r"\2.step()", 0.85),
    "AMP804": (rf"^(\s*){SCALER}\.update\(\)$", r"\1pass", 0.9),
    "AMP807|AMP808": (rf"^(\s*){SCALER}\.unscale_\(.*\)(.*)$", r"\1pass", 0.8),
    "AMP809": (rf"^(\s*){SCALER}\.unscale_\((.*)\)$", r"\1\2.unscale_(\3)\n\1\2.unscale_(\3)", 0.95),
    "AMP817": (rf"^(\s*){SCALER}\.step\(([\w.]+)\)$", r"\1\2.step(\3)\n\1\3.step()", 0.9),
}


@pytest.mark.parametrize("wanted", SLIPS)
def test_a_slip_in_a_correct_loop_is_found(wanted: str) -> None:
    """Not all: where a helper of another file may do anything, silence is right."""
    pattern, replacement, share = SLIPS[wanted]
    found, missed = [], []
    for path in CORRECT:
        text = path.read_text(encoding="utf-8")
        slipped = re.sub(pattern, replacement, text, flags=re.MULTILINE)
        if slipped != text:
            (found if set(wanted.split("|")) & set(codes(slipped)) else missed).append(path.stem)
    assert len(found) + len(missed) > 20
    assert len(found) >= share * (len(found) + len(missed)), missed


# repairs


@pytest.mark.parametrize("name", BAD)
def test_a_repair_relints_clean_and_is_idempotent(name: str) -> None:
    before = lint(BAD[name])
    offered = any(finding.fixable for finding in before.findings)
    fixed = lint(BAD[name], fix=True)
    if not offered:
        assert fixed.after == BAD[name]
        return
    assert fixed.after != BAD[name]
    assert [finding.code for finding in fixed.findings] == []
    assert fixed.fixed == len(before.findings)
    ast.parse(fixed.after)
    again = lint(fixed.after, fix=True)
    assert again.after == fixed.after
    assert again.fixed == 0


def test_repairs_are_offered_where_they_are_safe() -> None:
    offered = {code for code, page in PAGES.items() if any(f.fixable for f in lint(page.bad.code).findings)}
    assert offered == REPAIRED


@pytest.mark.parametrize("code", sorted(REPAIRED - {"AMP818", "AMP820", "AMP836"}))
def test_a_repair_makes_the_good_example_of_the_page(code: str) -> None:
    assert lint(PAGES[code].bad.code, fix=True).after == PAGES[code].good.code


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


def test_old_names_are_renamed_everywhere_or_nowhere() -> None:
    text = (
        "import torch\nfrom torch.cuda.amp import autocast as cast, custom_fwd\n\n\n"
        "class F(torch.autograd.Function):\n"
        "    @staticmethod\n    @custom_fwd\n    def forward(ctx, x):\n        return x\n\n\n"
        "with cast(True, torch.bfloat16, False), torch.cuda.amp.autocast():\n    pass\n"
        "scaler = torch.cuda.amp.GradScaler(1024.0, enabled=True)\n"
    )
    fixed = lint(text, fix=True).after
    assert "from torch.amp import autocast as cast, custom_fwd" in fixed
    assert '@custom_fwd(device_type="cuda")' in fixed
    assert 'cast("cuda", enabled=True, dtype=torch.bfloat16, cache_enabled=False)' in fixed
    assert 'torch.amp.autocast("cuda")' in fixed
    assert 'torch.amp.GradScaler("cuda", 1024.0, enabled=True)' in fixed
    assert codes(fixed) == []
    handed_on = (
        "from torch.cuda.amp import autocast\n\n\ndef enter(context=autocast):\n    return context()\n"
    )
    assert codes(handed_on) == ["AMP864"]
    assert lint(handed_on, fix=True).after == handed_on


@pytest.mark.parametrize(
    "text",
    [
        "import torch\n\n\ndef f(s: torch.cuda.amp.GradScaler) -> torch.cuda.amp.GradScaler: ...\n",
        "import torch\n\nif torch.__version__ < '2.4':\n    scaler = torch.cuda.amp.GradScaler()\n",
        "try:\n    from torch.amp import autocast\nexcept ImportError:\n"
        "    from torch.cuda.amp import autocast\n",
        "import torch\n\nKNOWN = [torch.cuda.amp.autocast, torch.autocast]\n",
        "import torch\n\nprint(type(None) is torch.cuda.amp.autocast)\n",
    ],
)
def test_old_names_that_are_meant_are_left_alone(text: str) -> None:
    assert codes(text) == []


@pytest.mark.parametrize(
    "written", ["GradScaler", "'GradScaler'", "torch.amp.GradScaler | None", "Optional[GradScaler]"]
)
def test_an_annotation_says_what_a_parameter_is(written: str) -> None:
    """Nothing else would: the step and the update are somebody else's."""
    text = (
        f"import torch\n\n\ndef back(loss, optimizer, s: {written}):\n    s.scale(loss).backward()\n"
        "    optimizer.step()\n    optimizer.zero_grad()\n"
    )
    assert codes(text) == ["AMP803"]
    assert codes(text.replace(f": {written}", "")) == []


def test_a_number_by_its_name() -> None:
    text = "import torch\n\nLOW = -1e9\n\n\ndef f(scores, mask):\n    return scores.masked_fill(mask, LOW)\n"
    assert codes(text) == ["AMP860"]
    assert "scores.masked_fill(mask, torch.finfo(scores.dtype).min)" in lint(text, fix=True).after
    assert codes(text.replace("LOW = -1e9", "LOW = 1e9").replace(", LOW)", ", -LOW)")) == ["AMP860"]
    assert codes(text.replace("def f(", "LOW = -1e4\n\n\ndef f(")) == []
    assert codes(text.replace("mask):", "mask, LOW):")) == []


# data flow: what is certain through other names, objects, helpers and conditions

LOOP = """
import torch


def train(model, loader, optimizer, criterion{arguments}):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
{body}
"""


def loop(body: str, arguments: str = "") -> str:
    lines = "\n".join(f"        {line}" for line in body.split("\n"))
    return LOOP.format(arguments=arguments, body=lines)


@pytest.mark.parametrize(
    ("body", "wanted"),
    [
        # another name for the same thing
        ("s = scaler\ns.scale(loss).backward()\noptimizer.step()\ns.update()", ["AMP803"]),
        ("total = loss + 1\ntotal.backward()\nscaler.step(optimizer)\nscaler.update()", ["AMP802"]),
        # both branches do it; one does; the other may not
        (
            "if x.ndim:\n    loss.backward()\nelse:\n    loss.backward()\n"
            "scaler.step(optimizer)\nscaler.update()",
            ["AMP802", "AMP802"],
        ),
        (
            "if flag:\n    loss.backward()\n    scaler.step(optimizer)\n    scaler.update()\n"
            "else:\n    scaler.scale(loss).backward()\n    scaler.step(optimizer)\n    scaler.update()",
            ["AMP802"],
        ),
        # a condition that is met twice is the same both times
        (
            "if flag:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()\n"
            "if flag:\n    scaler.step(optimizer)\n    scaler.update()\nelse:\n    optimizer.step()",
            [],
        ),
        (
            "if flag:\n    scaler.scale(loss).backward()\nelse:\n    loss.backward()\n"
            "if not flag:\n    scaler.step(optimizer)\n    scaler.update()\nelse:\n    optimizer.step()",
            ["AMP802", "AMP803"],
        ),
        # code that is not here may do anything with what it is given, and nothing with what it is not
        ("scaler.scale(loss).backward()\nhelp_me(scaler, optimizer)\noptimizer.step()", []),
        ("scaler.scale(loss).backward()\nlog(loss.detach())\noptimizer.step()\nscaler.update()", ["AMP803"]),
        ("my_backward(loss)\nscaler.step(optimizer)\nscaler.update()", []),
        ("scaler.scale(loss).backward()\nscaler.step(optimizer)\nfinish(scaler)", []),
        ("scaler.scale(loss).backward()\nscaler.step(optimizer)\nfinish(x)", ["AMP804"]),
        # scaled on one path only, which nobody can tell
        (
            "out = loss\nif x.sum() > 0:\n    out = scaler.scale(loss)\nout.backward()\noptimizer.step()\n"
            "scaler.update()",
            [],
        ),
        # paths that end
        (
            "if bad(x):\n    loss.backward()\n    continue\nscaler.scale(loss).backward()\n"
            "scaler.step(optimizer)\nscaler.update()",
            [],
        ),
        (
            "try:\n    loss.backward()\nexcept RuntimeError:\n    raise\n"
            "scaler.step(optimizer)\nscaler.update()",
            ["AMP802"],
        ),
        # a sum goes through the graphs of both
        (
            "a, b = model(x).sum(), model(y)\nscaler.scale(a + b.sum()).backward()\n"
            "scaler.scale(b.mean()).backward()\nscaler.step(optimizer)\nscaler.update()",
            ["AMP835"],
        ),
        # walrus, tuple, conditional expression
        ("(scaled := scaler.scale(loss)).backward()\noptimizer.step()\nscaler.update()", ["AMP803"]),
        ("a, b = loss, 1\na.backward()\nscaler.step(optimizer)\nscaler.update()", ["AMP802"]),
        (
            "out = scaler.scale(loss) if flag else loss\nout.backward()\n"
            "scaler.step(optimizer)\nscaler.update()",
            ["AMP802"],
        ),
    ],
)
def test_data_flow(body: str, wanted: list[str]) -> None:
    assert sorted(codes(loop(body, ", flag=True"))) == wanted


def test_a_lambda_or_an_own_context_is_not_known() -> None:
    text = GOOD["AMP842"].replace('torch.autocast("cuda", dtype=torch.float16)', "mixed_precision()")
    assert codes(text) == []


STEP = "scaler.scale(loss).backward()\n{}\nscaler.step(optimizer)\nscaler.update()"


@pytest.mark.parametrize(
    "text",
    [
        # a factor commutes with the scale
        loop(STEP.format("for p in model.parameters():\n    p.grad.data.mul_(0.5)\n    p.grad = p.grad / 2")),
        # a switch that may be off, and here is
        BAD["AMP844"]
        .replace("dtype=torch.float16", "enabled=fp16")
        .replace("optimizer)", "optimizer, fp16=False)"),
        # torch switches float32 autocast off
        BAD["AMP845"].replace("torch.float16", "torch.float32"),
        # a thread that only loads
        BAD["AMP851 again"].replace("model(x).half()", "x.half()"),
        # each call of the function is another run
        GOOD["AMP802"]
        .replace("optimizer, criterion", "criterion")
        .replace("    scaler =", "    optimizer = make_optimizer(model)\n    scaler =")
        + "\nfor seed in range(3):\n    train(make_model(seed), [], None)\n",
        # evaluated both ways
        GOOD["AMP843"].replace(
            "    with torch.no_grad(), torch.autocast",
            "    with torch.no_grad():\n        for x, y in loader:\n            metric.update(model(x), y)\n"
            "    with torch.no_grad(), torch.autocast",
        ),
        # no forward pass
        BAD["AMP843"].replace("metric.update(model(x), y)", "metric.update(model.penalty(), y)"),
        # two numbers make a float32 tensor
        "import torch\n\n\ndef bias(mask):\n    return torch.where(mask, 0.0, -1e9)\n",
        # what it does in float16 is said beside it
        "import torch\n\n\ndef f(x, mask):\n    if x.dtype != torch.float16:\n        x = x - mask * 1e30\n"
        "    return x\n",
        # it casts by itself
        BAD["AMP850"].replace("return x @ w", "return x.float() @ w.float()"),
        # applied outside of autocast
        BAD["AMP850"].replace("return Product.apply(x, w)", "return x @ w") + "\n\nProduct.apply(1, 2)\n",
        # a condition on a parameter is the caller's condition
        loop(
            "def both(s=None):\n    if s is not None:\n        s.scale(loss).backward()\n    else:\n"
            "        loss.backward()\n\n\nboth(s=amp_scaler)\nif amp_scaler is not None:\n"
            "    amp_scaler.step(optimizer)\n"
            "    amp_scaler.update()\nelse:\n    optimizer.step()",
            ", amp_scaler=None",
        ),
        # somebody else holds the same scaler
        BAD["AMP804 again"].replace(
            "self.grad_scaler.step(self.opt)",
            "self.grad_scaler.step(self.opt)\n" + " " * 16 + "self.owner.grad_scaler.update()",
        ),
    ],
)
def test_what_published_code_does_rightly_is_left_alone(text: str) -> None:
    """Each of these was an alarm in somebody's package, and wrong."""
    assert codes(text) == []


# suppression and choice


def test_a_comment_hides_a_finding_and_says_why() -> None:
    text = BAD["AMP803"].replace(
        "optimizer.step()", "optimizer.step()  # ampaudit: ignore[AMP803] a hook unscales"
    )
    (finding,) = lint(text).findings
    assert finding.suppressed == "comment: a hook unscales"
    assert lint(text, fix=True).after == text
    everything = text.replace("[AMP803]", "[]")
    assert codes(everything) == []


def test_a_comment_that_hides_nothing_is_reported() -> None:
    text = GOOD["AMP803"].replace("scaler.update()", "scaler.update()  # ampaudit: ignore[AMP803]")
    assert codes(text) == ["AMP991"]
    of_a_scan = text.replace("AMP803", "AMP102")
    assert codes(of_a_scan) == []


def test_codes_are_chosen_by_how_they_begin() -> None:
    text = BAD["AMP803"] + "\n\n" + BAD["AMP861"].removeprefix("import torch\n")

    def chosen(select: str, ignore: str = "") -> set[str]:
        choice = RuleSelection.parse([select], [ignore])
        return {finding.code for finding in lint_text(text, "x.py", choice).findings}

    assert chosen("") == {"AMP803", "AMP861"}
    assert chosen("AMP80") == {"AMP803"}
    assert chosen("AMP8", "AMP80") == {"AMP861"}
    assert chosen("AMP803,amp86", "AMP8") == {"AMP803", "AMP861"}
    assert chosen("ALL", "AMP861") == {"AMP803"}
    with pytest.raises(UsageError, match="'AMP102' matches no lint rule"):
        RuleSelection.parse(["AMP102"], [])


# notebooks and Markdown


def notebook(*cells: str, language: str = "python", indent: int = 1) -> str:
    made = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Training\n"]},
        *(
            {
                "cell_type": "code",
                "execution_count": 3,
                "metadata": {},
                "outputs": [{"data": "é"}],
                "source": c.splitlines(True),
            }
            for c in cells
        ),
    ]
    whole = {
        "cells": made,
        "metadata": {"language_info": {"name": language}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=indent, ensure_ascii=False) + "\n"


SETUP = (
    "%matplotlib inline\n!pip install torch\nfiles = !ls\nimport torch\n"
    "scaler = torch.amp.GradScaler('cuda')\n"
)
CELL = (
    "%%time\nfor x, y in loader:\n    loss = criterion(model(x), y)\n"
    "    loss.backward()\n    scaler.step(optimizer)\n    scaler.update()"
)


@pytest.mark.parametrize("indent", [1, 2, 4])
def test_a_notebook_is_one_script_and_findings_are_in_cells(indent: int) -> None:
    text = notebook(SETUP, "%%bash\nls *\n", "display(model)\nmodel?\n", CELL, indent=indent)
    linted = lint(text, "train.ipynb")
    (finding,) = linted.findings
    assert (finding.code, finding.cell, finding.line) == ("AMP802", 5, 4)
    fixed = lint(text, "train.ipynb", fix=True)
    cells = json.loads(fixed.after)["cells"]
    assert "".join(cells[4]["source"]) == CELL.replace("loss.backward()", "scaler.scale(loss).backward()")
    assert fixed.after == text.replace('"    loss.backward()\\n"', '"    scaler.scale(loss).backward()\\n"')
    assert not lint(fixed.after, "train.ipynb").findings


def test_a_broken_cell_is_named_and_the_others_go_on() -> None:
    linted = lint(notebook(SETUP, "this is broken python\n", CELL), "train.ipynb")
    assert [(f.code, f.cell) for f in linted.findings] == [("AMP802", 4)]
    (unread,) = linted.unread
    assert unread.reason.startswith("cell 3: not valid Python")
    assert lint(notebook(CELL, language="julia"), "x.ipynb").findings == []
    assert "not a notebook" in lint('{"a": 1}', "x.ipynb").unread[0].reason


def test_code_blocks_of_markdown() -> None:
    text = (
        "# Mixed precision\n\n```python\nfrom torch.cuda.amp import GradScaler as Scaler\n```\n\n"
        "1. then\n\n   ```py\n   scaler = Scaler()\n   for x in data:\n       loss = model(x).sum()\n"
        "       scaler.scale(loss).backward()\n       optimizer.step()\n       scaler.update()\n   ```\n\n"
        "```bash\nmake\n```\n\n```python\nnot python at all ...\n```\n"
    )
    linted = lint(text, "README.md")
    assert not linted.unread
    assert [(f.code, f.line, f.column) for f in linted.findings] == [("AMP864", 4, 1), ("AMP803", 14, 8)]
    fixed = lint(text, "README.md", fix=True)
    assert "       scaler.step(optimizer)\n" in fixed.after
    assert fixed.after.replace("scaler.step(optimizer)", "optimizer.step()").count("\n") == text.count("\n")


# bad input


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


def test_a_megabyte_is_read(tmp_path: Path) -> None:
    path = tmp_path / "long.py"
    filler = "".join(
        f"def helper_{i}(a, b):\n    if a:\n        return b + {i}\n    return a\n\n\n" for i in range(14_000)
    )
    path.write_text(filler + BAD["AMP803"])
    assert path.stat().st_size > 1_000_000
    assert [f.code for f in lint_file(path, RuleSelection()).findings] == ["AMP803"]


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


def test_directories_links_globs_and_what_is_left_out(tmp_path: Path) -> None:
    for name in (
        "a.py",
        "deep/b.py",
        "deep/c.ipynb",
        ".git/d.py",
        "venv/e.py",
        "f.txt",
        "build/g.py",
        "h.md",
    ):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x = 1\n" if not name.endswith("ipynb") else notebook("x = 1"))
    (tmp_path / "deep" / "loop").symlink_to(tmp_path)
    (tmp_path / "same.py").symlink_to(tmp_path / "a.py")
    (tmp_path / "lost.py").symlink_to(tmp_path / "nowhere")

    def read(*paths: str, exclude: tuple[str, ...] = ()) -> list[str]:
        found = lint_files([str(tmp_path / p) for p in paths], RuleSelection(), exclude=exclude)
        return [os.path.relpath(f.path, tmp_path) for f in found]

    assert read("") == ["a.py", "h.md", "lost.py", "deep/b.py", "deep/c.ipynb"]
    assert read("", exclude=("deep", "h.*")) == ["a.py", "lost.py"]
    assert read("**/*.py") == ["a.py", "build/g.py", "deep/b.py", "lost.py", "venv/e.py"]
    assert read("f.txt", "a.py", "a.py") == ["f.txt", "a.py"]
    assert read("nothing.py") == ["nothing.py"]
    (lost,) = [f for f in lint_files([str(tmp_path)], RuleSelection()) if f.path.endswith("lost.py")]
    assert lost.unread[0].reason == "No such file or directory"


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
def test_correct_loops_without_some_lines_make_no_trouble(path: Path, data: st.DataObject) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    keep = data.draw(st.lists(st.booleans(), min_size=len(lines), max_size=len(lines)))
    text = "\n".join(line for line, kept in zip(lines, keep, strict=True) if kept) + "\n"
    once = lint(text, fix=True)
    assert not any("internal error" in unread.reason for unread in once.unread)
    if not once.unread and once.after != text:
        ast.parse(once.after)
        assert lint(once.after, fix=True).after == once.after
