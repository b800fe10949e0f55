"""Rewrites as diffs: the one place that fits is changed and nothing else, or there is no diff."""

from __future__ import annotations

import ast
import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from ampaudit.audit.advice import Proposal, diff_of
from ampaudit.audit.advice.interface import LineChange
from ampaudit.cli.program import main
from ampaudit.core.sites import SourceLine
from tests.support.cures.case import Case
from tests.support.cures.table import CASES
from tests.support.diffs import patched

Cli = Callable[..., Result]
IMPORTS = "import math\nimport torch\nfrom torch import nn\nimport torch.nn.functional as F\n\n\n"


def difference(path: Path, text: str, change: Callable[[SourceLine], LineChange], mark: str) -> str:
    """The diff for the line with a mark."""
    path.write_text(text, encoding="utf-8", newline="")
    number = next(n for n, line in enumerate(text.split("\n"), 1) if mark in line)
    line = SourceLine(str(path), number, text.split("\n")[number - 1].strip())
    return diff_of(Proposal("rewrite", "", "", source=change(line)))


def rewritten(path: Path, body: str, pattern: str, mark: str = "y =", **rest: object) -> str | None:
    """The body of a function after the diff; ``None`` without one. Everything outside of it must stay."""
    text = f"{IMPORTS}def forward(self, x, q, k, mask):\n{body}"
    if pattern == "scale":
        numbers = {n: line for n, line in enumerate(text.split("\n"), 1) if "# 2" in line}
        number, code = next(iter(numbers.items()), (0, ""))
        rest["second"] = SourceLine(str(path), number, code.strip()) if number else None

    def change(line: SourceLine) -> LineChange:
        second = rest.get("second") or (line if pattern == "scale" else None)
        return LineChange(pattern, line, **(rest | {"second": second}))  # type: ignore[arg-type]

    diff = difference(path, text, change, mark)
    if not diff:
        return None
    after = patched(text, diff)
    ast.parse(after)
    head, _, tail = after.partition("def forward(self, x, q, k, mask):\n")
    assert head == IMPORTS
    assert diff_of(Proposal("rewrite", "", "", source=change(SourceLine(str(path), 1, "")))) == ""
    return tail


LOG_SOFTMAX = [
    ("torch.log(torch.softmax(x, dim=1))", "torch.log_softmax(x, dim=1)"),
    ("torch.log(F.softmax(x, dim=1, dtype=x.dtype))", "F.log_softmax(x, dim=1, dtype=x.dtype)"),
    ("nn.functional.softmax(x, 1).log()", "nn.functional.log_softmax(x, 1)"),
    ("x[0].softmax(dim=-1).log().sum()", "x[0].log_softmax(dim=-1).sum()"),
    ("torch.log((torch.softmax(x, -1)))", "torch.log_softmax(x, -1)"),
    ("3 * (torch.log(torch.softmax(x, -1))) ** 2", "3 * (torch.log_softmax(x, -1)) ** 2"),
    ("torch.log(torch.softmax(torch.softmax(x, 0), 1))", "torch.log_softmax(torch.softmax(x, 0), 1)"),
    ('f("é ü", torch.log(torch.softmax(x, -1)))', 'f("é ü", torch.log_softmax(x, -1))'),
    ('f("torch.log(torch.softmax(x, -1))", x)', None),
    ("torch.log(torch.softmax(x, -1)) + torch.log(torch.softmax(q, -1))", None),
    ("torch.log(self.softmax(x))", None),
    ("torch.log(self.softmax(-1))", "self.log_softmax(-1)"),  # only the method of a tensor takes a number
    ("self.log(torch.softmax(x, -1))", None),
    ("math.log(torch.softmax(x, -1))", None),
    ("torch.log(torch.softmax(x, -1), out=q)", None),
    ("torch.log(torch.softmax(x, -1) + 1e-8)", None),
    ("torch.log2(torch.softmax(x, -1))", None),
    ("torch.log(torch.softmax(x, -1)) + torch.log(q)", None),  # q may be a softmax, too
    ("torch.log(torch.softmax(x, -1)) * math.log(2)", "torch.log_softmax(x, -1) * math.log(2)"),
    ("torch.log(x.softmax(mask))", None),
    ("torch.log(  # of what\n        torch.softmax(x, -1)\n    )", None),  # the comment would be lost
    (
        "torch.log(torch.softmax(\n        x,  # of what\n        -1))",
        "torch.log_softmax(\n        x,  # of what\n        -1)",
    ),
]


@pytest.mark.parametrize(("old", "new"), LOG_SOFTMAX)
def test_log_softmax(old: str, new: str | None, tmp_path: Path) -> None:
    found = rewritten(tmp_path / "m.py", f"    y = {old}  # as it was\n    return y\n", "log_softmax")
    assert found == (f"    y = {new}  # as it was\n    return y\n" if new else None)


TWO_LINES = [
    ("p = torch.softmax(x, -1)\n    y = torch.log(p)", "y = torch.log_softmax(x, -1)"),
    ("p = torch.softmax(self.inner(x), -1)\n    y = p.log()", "y = torch.log_softmax(self.inner(x), -1)"),
    ("p = torch.softmax(x, -1)  # why\n    y = torch.log(p)",
     "p = torch.softmax(x, -1)  # why\n    y = torch.log_softmax(x, -1)"),
    ("p = torch.softmax(x, -1)\n    y = torch.log(p) * p",
     "p = torch.softmax(x, -1)\n    y = torch.log_softmax(x, -1) * p"),
    ("p = torch.softmax(self.inner(x), -1)\n    y = torch.log(p) * p", None),
    ("p = torch.softmax(self.inner(x), -1)\n    g(x)\n    y = torch.log(p)", None),
    ("p = torch.softmax(x, -1)\n    x = q\n    y = torch.log(p)", None),
    ("p = torch.softmax(x, self.dim)\n    self.dim = 0\n    y = torch.log(p)", None),
    ("p = torch.softmax(x, -1)\n    p = p * q\n    y = torch.log(p)", None),
    ("p = torch.softmax(x, -1)\n    if q:\n        p = q\n    y = torch.log(p)", None),
    ("if q:\n        p = torch.softmax(x, -1)\n    y = torch.log(p)", None),
    ("p = torch.softmax(x, -1)\n    y = [torch.log(p) for p in (torch.softmax(q, -1),)]", None),
    ("p = torch.softmax(x, -1)\n    y = map(lambda p: torch.log(p), (torch.softmax(q, -1),))", None),
    ("p = r = torch.softmax(x, -1)\n    y = torch.log(p)", None),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), TWO_LINES)
def test_log_softmax_on_two_lines(old: str, new: str | None, tmp_path: Path) -> None:
    found = rewritten(tmp_path / "m.py", f"    {old}\n    return y\n", "log_softmax")
    assert found == (f"    {new}\n    return y\n" if new else None)


LOG_SIGMOID = [
    ("torch.log(1 - s)", None),
    ("torch.log(1 - torch.sigmoid(x))", "F.logsigmoid(-x)"),
    ("torch.log(1.0 - F.sigmoid(x + q))", "F.logsigmoid(-(x + q))"),
    ("(1 - x[0].sigmoid()).log()", "F.logsigmoid(-x[0])"),
    ("torch.log(torch.sigmoid(x)).mean()", "F.logsigmoid(x).mean()"),
    ("torch.log(torch.sigmoid(x) - 1)", None),
    ("torch.log(2 - torch.sigmoid(x))", None),
    ("torch.log(1 + torch.sigmoid(x))", None),
    ("torch.log(1 - self.sigmoid(x))", None),
    ("torch.log(1 - torch.sigmoid(x)) * torch.log(torch.sigmoid(x))", None),
]


def test_log_sigmoid_on_two_lines(tmp_path: Path) -> None:
    body = "    s = torch.sigmoid(x)\n    y = torch.log(1 - s)\n    return y{}\n"
    found = rewritten(tmp_path / "m.py", body.format(""), "log_sigmoid")
    assert found == "    y = F.logsigmoid(-x)\n    return y\n"
    found = rewritten(tmp_path / "n.py", body.format(", s"), "log_sigmoid")
    assert found == "    s = torch.sigmoid(x)\n    y = F.logsigmoid(-x)\n    return y, s\n"


@pytest.mark.parametrize(("old", "new"), LOG_SIGMOID)
def test_log_sigmoid(old: str, new: str | None, tmp_path: Path) -> None:
    found = rewritten(tmp_path / "m.py", f"    y = {old}\n    return y\n", "log_sigmoid")
    assert found == (f"    y = {new}\n    return y\n" if new else None)


SCALE = [
    ("y = q @ k.mT / 8", "y = (q / 8) @ k.mT"),
    ("y = q @ k.mT * self.scale + mask", "y = (q * self.scale) @ k.mT + mask"),
    ("y = self.scale * (q @ k.mT)", "y = (q * self.scale) @ k.mT"),
    ("y = torch.softmax((q @ k.mT) / math.sqrt(x.size(-1)), -1)",
     "y = torch.softmax((q / math.sqrt(x.size(-1))) @ k.mT, -1)"),
    ("y = 2 * (q @ k.mT / 8) @ x", "y = 2 * ((q / 8) @ k.mT) @ x"),
    ("y = torch.matmul(q + x, k.mT) / (2 * 4)", "y = torch.matmul((q + x) / (2 * 4), k.mT)"),
    ("y = q.matmul(k.mT) * d ** -0.5", "y = (q * (d ** -0.5)).matmul(k.mT)"),
    ("y = -q @ k.mT / 8", "y = ((-q) / 8) @ k.mT"),
    ("y = q @ k.mT / 8 + x @ k.mT / 8", None),
    ("y = 8 / (q @ k.mT)", None),
    ("y = (q @ k.mT + mask) / 8", None),
    ("y = q @ k.mT", None),
    ("y = q @ k.mT\n    y = y / 8  # 2", None),  # a comment on the line would be lost
    ("qy = q @ k.mT  # 1\n    y = torch.softmax(qy / 8, -1)  # 2",
     "qy = (q / 8) @ k.mT  # 1\n    y = torch.softmax(qy, -1)  # 2"),
    ("y = q @ k.mT\n    z = torch.softmax(y / 8, -1)  # 2", None),  # y is returned
    ("qy = q @ k.mT\n    if x:\n        return qy\n    y = torch.softmax(qy / 8, -1)  # 2", None),
    ("y = q @ k.mT\n    y = y / 8 if x else y  # 2", None),
    ("y = q @ k.mT\n    d = q.shape[-1]\n    z = y / d  # 2", None),
    ("y = q @ k.mT\n    y = y + mask\n    z = y / 8  # 2", None),
    ("y = q @ k.mT\n    z = y / y.size(-1)  # 2", None),
    ("y = q @ k.mT\n    z = y / next(x)  # 2", None),
    ("y = q @ k.mT\n    if mask is not None:\n        z = y / 8  # 2", None),
    ("y = q @ k.mT\n    z = y / 8 + y / 4  # 2", None),
]  # fmt: skip


@pytest.mark.parametrize(("old", "new"), SCALE)
def test_scale(old: str, new: str | None, tmp_path: Path) -> None:
    found = rewritten(tmp_path / "m.py", f"    {old}\n    return y\n", "scale")
    assert found == (f"    {new}\n    return y\n" if new else None)


@pytest.mark.parametrize("second", ["y = y / math.sqrt(64)", "y /= 8", "y *= 0.125"])
def test_a_line_that_only_scales_goes(second: str, tmp_path: Path) -> None:
    text = f"{IMPORTS}def forward(q, k):\n    y = q @ k.mT  # scores\n    {second}\n    return y\n"
    path = tmp_path / "m.py"
    lines = [SourceLine(str(path), 8, "y = q @ k.mT  # scores"), SourceLine(str(path), 9, second)]
    path.write_text(text, encoding="utf-8")
    diff = diff_of(Proposal("rewrite", "", "", source=LineChange("scale", lines[0], lines[1])))
    number = {"y = y / math.sqrt(64)": "/ math.sqrt(64)", "y /= 8": "/ 8", "y *= 0.125": "* 0.125"}[second]
    assert patched(text, diff) == (
        f"{IMPORTS}def forward(q, k):\n    y = (q {number}) @ k.mT  # scores\n    return y\n"
    )


@pytest.mark.parametrize(("between", "found"), [("q = k", True), ("assert y", False)])
def test_a_line_that_only_scales_stays_if_code_before_reads_the_scores(
    between: str, found: bool, tmp_path: Path
) -> None:
    text = f"{IMPORTS}def forward(q, k):\n    y = q @ k.mT\n    {between}\n    y /= 8\n    return y\n"
    second = SourceLine(str(tmp_path / "m.py"), 10, "y /= 8")
    diff = difference(tmp_path / "m.py", text, lambda at: LineChange("scale", at, second), "y = q")
    assert bool(diff) is found


def test_a_line_of_another_file_is_not_looked_up_in_this_one(tmp_path: Path) -> None:
    text = f"{IMPORTS}def f(q, k):\n    return q @ k.mT / 8 if q else q @ k.mT\n"
    other = SourceLine(str(tmp_path / "n.py"), 8, "y = f(q, k) / 8")
    for second, found in ((None, True), (other, False)):
        diff = difference(
            tmp_path / "m.py", text, lambda at, s=second: LineChange("scale", at, s or at), "q @"
        )
        assert bool(diff) is found


NUMBERS = [
    ("x / (x.sum() + 1e-8)", 1e-8, "1e-05", False, "x / (x.sum() + 1e-05)"),
    ("x / (x.sum() + 0.00000001)", 1e-8, "1e-05", False, "x / (x.sum() + 1e-05)"),
    ("x / (x.sum() + 1e-8) + q / (q.sum() + 1e-8)", 1e-8, "1e-05", False, None),
    ("x / (x.sum() + self.eps)", 1e-8, "1e-05", False, None),
    ("f('1e-8', x)", 1e-8, "1e-05", False, None),
    ("f(f'{1e-8}', x / (x.sum() + self.eps))", 1e-8, "1e-05", False, None),
    ("x.masked_fill(mask, -1e9)", -1e9, "", True, "x.masked_fill(mask, torch.finfo(x.dtype).min)"),
    (
        "x.masked_fill(mask, value=-1e9)",
        -1e9,
        "",
        True,
        "x.masked_fill(mask, value=torch.finfo(x.dtype).min)",
    ),
    ("torch.where(mask, x, -1e9)", -1e9, "", True, "torch.where(mask, x, torch.finfo(x.dtype).min)"),
    ("torch.full_like(x, 1e9)", 1e9, "", True, "torch.full_like(x, torch.finfo(x.dtype).max)"),
    ("(1.0 - mask) * -1e9", -1e9, "", True, "(1.0 - mask) * torch.finfo(mask.dtype).min"),
    ("(1.0 - mask.float()) * -1e9", -1e9, "", True, None),
    ("(q @ k).masked_fill(mask, -1e9)", -1e9, "", True, None),
    ("x.masked_fill(mask, -1e9)", -1e9, "", False, None),
    ("x.masked_fill(mask, 1e9)", -1e9, "", True, None),
    ("x.masked_fill(mask, -1e9).masked_fill(q, -1e9)", -1e9, "", True, None),
]


@pytest.mark.parametrize(("old", "number", "code", "held", "new"), NUMBERS)
def test_numbers(old: str, number: float, code: str, held: bool, new: str | None, tmp_path: Path) -> None:
    body = f"    y = {old}\n    return y\n"
    found = rewritten(tmp_path / "m.py", body, "number", old=number, new=code, held=held)
    assert found == (f"    y = {new}\n    return y\n" if new else None)


SAME = "y = torch.log(torch.softmax(x, -1))"
UNSURE = {
    "two statements on the line": f"{IMPORTS}def f(x):\n    {SAME}; z = torch.log(torch.softmax(y, -1))\n",
    "another module is called torch": f"{IMPORTS}def f(torch, x):\n    {SAME}\n",
    "the name is bound again": f"{IMPORTS}torch = mine\n\n\ndef f(x):\n    {SAME}\n",
    "a class has the name": f"{IMPORTS}class torch(mine):\n    pass\n\n\ndef f(x):\n    {SAME}\n",
    "a function imports another": f"{IMPORTS}def f(x):\n    import mine as torch\n    {SAME}\n",
    "no import": f"def f(x):\n    {SAME}\n",
    "not Python of this version": f"{IMPORTS}def f(x):\n    {SAME}\n    print 'x'\n",
    "other line ends": f"{IMPORTS}def f(x):\n    {SAME}\n".replace("\n", "\r\n"),
}


@pytest.mark.parametrize("name", UNSURE)
def test_where_it_is_not_sure_there_is_no_diff(name: str, tmp_path: Path) -> None:
    assert difference(tmp_path / "m.py", UNSURE[name], lambda at: LineChange("log_softmax", at), SAME) == ""


def test_an_import_that_is_repeated_binds_the_same_name(tmp_path: Path) -> None:
    text = f"{IMPORTS}def f(x):\n    import torch\n    {SAME}\n"
    diff = difference(tmp_path / "m.py", text, lambda at: LineChange("log_softmax", at), SAME)
    assert patched(text, diff) == text.replace(SAME, "y = torch.log_softmax(x, -1)")


def test_a_file_that_has_changed_since_gets_no_diff(tmp_path: Path) -> None:
    path = tmp_path / "m.py"
    path.write_text(f"{IMPORTS}def f(x):\n    {SAME}  # new\n", encoding="utf-8")
    line = SourceLine(str(path), 8, SAME)
    assert diff_of(Proposal("rewrite", "", "", source=LineChange("log_softmax", line))) == ""


def test_installed_libraries_get_no_diff() -> None:
    import rich.text

    path = rich.text.__file__
    lines = Path(path).read_text(encoding="utf-8").split("\n")
    number, code = next((n, line) for n, line in enumerate(lines, 1) if line.strip() == "tab_size = 8")
    change = LineChange("number", SourceLine(path, number, code.strip()), old=8, new="4")
    assert diff_of(Proposal("rewrite", "", "", source=change)) == ""


NEEDS_PATCH = pytest.mark.skipif(shutil.which("patch") is None, reason="there is no patch on this machine")


@NEEDS_PATCH
@pytest.mark.parametrize("ending", ["", "\n", "\n\n"])
@pytest.mark.parametrize("indent", ["\t", "  "])
def test_patch_applies_the_diff(ending: str, indent: str, tmp_path: Path) -> None:
    text = f"{IMPORTS}def f(x):\n{indent}if x:\n{indent * 2}{SAME}{ending}"
    path = tmp_path / "m.py"
    diff = difference(path, text, lambda at: LineChange("log_softmax", at), SAME)
    subprocess.run(["patch", "-s", str(path)], input=diff, text=True, check=True, cwd=tmp_path)
    assert path.read_text(encoding="utf-8") == text.replace(SAME, "y = torch.log_softmax(x, -1)")


def model(path: Path, case: Case) -> Path:
    path.write_text(case.source, encoding="utf-8")
    return path


@pytest.fixture
def inside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cli:
    """The program, called in a directory and in this process."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "60")
    return lambda *arguments: CliRunner().invoke(main, [*map(str, arguments)])


@NEEDS_PATCH
def test_the_printed_report_can_be_piped_to_patch(tmp_path: Path, inside: Cli) -> None:
    case = CASES["log_softmax: log of softmax"]
    long = case.source.replace("  # scores", f"  # {'scores_' * 20}")
    path = tmp_path / "model.py"
    path.write_text(long, encoding="utf-8")
    done = inside("scan", path.name, "--policy", "half", "--diff")
    assert done.exit_code == 1
    subprocess.run(["patch", "-s", "-p0"], input=done.stdout, text=True, check=True, cwd=tmp_path)
    assert path.read_text(encoding="utf-8") == case.rewritten.replace("  # scores", f"  # {'scores_' * 20}")
    again = inside("scan", path.name, "--policy", "half", "--diff")
    assert again.exit_code == 0
    assert "+++" not in again.stdout


def test_two_findings_of_a_line_have_one_diff(tmp_path: Path, inside: Cli) -> None:
    case = CASES["log_softmax: one line in a loop"]
    twice = case.source.replace("(self.b, 0.01)", "(self.b, 0.5)")
    (tmp_path / "model.py").write_text(twice, encoding="utf-8")
    done = inside("scan", "model.py", "--policy", "half", "--diff")
    assert "2 places break" in done.stdout
    assert done.stdout.count("+++") == 1


def test_reports_carry_the_diff(tmp_path: Path, inside: Cli) -> None:
    path = model(tmp_path / "model.py", CASES["log_softmax: log of softmax"])
    done = inside("scan", path.name, "--policy", "half", "--diff", "--format", "json")
    (saved := tmp_path / "report.json").write_text(done.stdout, encoding="utf-8")
    trials = [t for f in json.loads(done.stdout)["findings"] for t in f.get("tried", ())]
    assert [bool(t["diff"]) for t in trials] == [True, False]
    assert trials[0]["outcome"] == "cure"
    assert trials[0]["after_db"] > 20
    line = "+        return torch.log_softmax(z, dim=-1)  # scores"
    assert line in trials[0]["diff"]
    for form in ("text", "markdown", "html"):
        assert line in inside("report", saved, "--format", form).stdout, form
    without = inside("scan", path.name, "--policy", "half", "--advise", "--format", "json")
    assert '"diff": ""' in without.stdout
    assert "@@" not in without.stdout
