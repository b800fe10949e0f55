"""Gaps: what was not looked at stands in the verdict of every format, and fails with ``--fail-on gap``."""

from __future__ import annotations

import html
import json
import subprocess
from collections.abc import Callable
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.ci.judge import judge, known_target, measured_in
from ampaudit.core.sites import SiteId
from ampaudit.findings.finding import Gap, GapKind, Severity, gaps_in_words
from ampaudit.render.render import as_file
from ampaudit.report.check import Budgets
from ampaudit.report.documents import parse_document
from ampaudit.report.model import Report
from tests.support.wrap import Wrap

Cli = Callable[..., subprocess.CompletedProcess[str]]
X = torch.linspace(-1, 1, 32).reshape(4, 8)
FILE = (
    "@torch.library.custom_op('ampaudit_gaps::double', mutates_args=())\n"
    "def double(x: torch.Tensor) -> torch.Tensor:\n    return x * 2\n"
    "@double.register_fake\ndef _(x):\n    return torch.empty_like(x)\n"
    "class Model(nn.Module):\n    def forward(self, x):\n        return double(double(x)) + 1\n"
    "def example_inputs():\n    return torch.randn(4, 8)\n"
)
WORDS = "1 gap (not audited inside: ampaudit_gaps.double)"


@torch.library.custom_op("ampaudit_gaps_here::double", mutates_args=())
def double(x: torch.Tensor) -> torch.Tensor:
    return x * 2


@double.register_fake
def _(x: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(x)


def opaque(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return double(double(model.a(x)))


def branch(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    (made,) = torch.cond(x.sum() > 9, lambda v: (v + 1,), lambda v: (v - 1,), (model.a(x),))
    return made


def both(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return opaque(model, x) + branch(model, x)


def products(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    rows = torch.zeros(4, 8, dtype=torch.long)
    return torch.ones_like(x).scatter_reduce(0, rows, model.a(x), "prod")


def nothing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    return model.a(x) * 2  # type: ignore[no-any-return]


def scanned(function: Callable[..., torch.Tensor], **options: object) -> Report:
    model = Wrap(function, a=nn.Linear(8, 8)).eval()
    return ampaudit.scan(model, X, policy="half", **options)  # type: ignore[call-overload,no-any-return]


@pytest.mark.parametrize(
    ("function", "kinds"),
    [
        (opaque, [GapKind.OPAQUE]),
        (branch, [GapKind.CONTROL_FLOW]),
        (products, [GapKind.PRODUCT]),
        (both, [GapKind.OPAQUE, GapKind.CONTROL_FLOW]),
        (nothing, []),
    ],
)
def test_each_op_that_was_not_looked_at_is_one_gap(
    function: Callable[..., torch.Tensor], kinds: list[GapKind]
) -> None:
    report = scanned(function)
    assert [gap.kind for gap in report.gaps] == kinds
    assert {(gap.kind.code, gap.site) for gap in report.gaps} <= {(f.code, f.site) for f in report.findings}
    assert report.exit_code == 0
    assert scanned(function, fail_on="gap").exit_code == bool(kinds)
    assert scanned(function, fail_on="gap").gate == ("fail" if kinds else "pass")


def test_a_gap_counts_the_sites_of_its_op() -> None:
    (gap,) = scanned(opaque).gaps
    assert (gap.site, gap.sites) == ("(top)/ampaudit_gaps_here::double", 2)
    (finding,) = [f for f in scanned(opaque).findings if f.code == "AMP904"]
    assert finding.cause.endswith("at 2 sites")
    assert finding.source is not None
    assert finding.source.code == "return double(double(model.a(x)))"


def test_what_is_ignored_is_no_gap() -> None:
    report = scanned(both, fail_on="gap", ignore=["AMP904"])
    assert [gap.kind for gap in report.gaps] == [GapKind.CONTROL_FLOW]
    assert report.gate == "fail"
    report = scanned(both, fail_on="gap", ignore=["AMP904", "AMP901"])
    assert (report.gaps, report.gate) == ((), "pass")


def test_a_gap_fails_beside_errors_and_not_beside_warnings() -> None:
    def overflowing(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
        return model.a(x) * 1e6  # type: ignore[no-any-return]

    assert scanned(overflowing, fail_on="gap").exit_code == 1

    report = scanned(nothing, fail_on="gap", min_headroom=30.0)
    assert [f.severity for f in report.findings].count(Severity.WARNING) >= 1
    assert (report.count(Severity.ERROR), report.exit_code) == (0, 0)


def test_ranges_and_proofs_have_the_same_gap() -> None:
    for level in ("ranges", "static"):
        report = scanned(opaque, **{level: True})
        assert [gap.kind for gap in report.gaps] == [GapKind.OPAQUE]
        assert "not audited inside" in " ".join(as_file(report, "text").split())


def test_every_format_says_so_in_its_verdict() -> None:
    report = scanned(opaque, fail_on="gap")
    words = gaps_in_words(report.gaps)
    assert words == "1 gap (not audited inside: ampaudit_gaps_here.double)"
    assert words in report.headline
    first = as_file(report, "text").split("\n\n")[1]
    assert first.startswith("PASS")
    assert first.endswith("\ngate  fail (--fail-on gap)")
    assert words in " ".join(first.split())
    assert words in html.unescape(as_file(report, "markdown"))
    assert words in as_file(report, "html")
    assert "3 of 3 sites; 1 gap" in as_file(report, "html")
    assert as_file(report, "github").strip().endswith(f"{words}; gate: fail (--fail-on gap)")
    assert json.loads(as_file(report, "sarif"))["runs"][0]["properties"]["gaps"] == words
    suite = ElementTree.fromstring(as_file(report, "junit"))[0]
    assert suite.find("properties/property[@name='gaps']").get("value") == words  # type: ignore[union-attr]
    assert (suite.get("failures"), suite.find("testcase/failure").get("type")) == ("1", "AMP904")  # type: ignore[union-attr]
    document = json.loads(as_file(report, "json"))
    assert document["gaps"] == [
        {
            "site": "(top)/ampaudit_gaps_here::double",
            "kind": "opaque op",
            "op": "ampaudit_gaps_here.double.default",
            "reason": "it is run as one op, and only its results are measured",
            "sites": 2,
        }
    ]
    assert words in as_file(ampaudit.Comparison((report, report)), "text")
    del document["gaps"]  # of an earlier version
    assert parse_document(json.dumps(document), "old").gaps == ()  # type: ignore[union-attr]


def test_the_words_are_short() -> None:
    ops = [f"lib.op{number}.default" for number in range(5)]
    gaps = [Gap(SiteId(f"layer/{op}"), GapKind.OPAQUE, op, "why") for op in ops]
    assert gaps_in_words(gaps) == "5 gaps (not audited inside: lib.op0, lib.op1, lib.op2 and 2 more)"
    assert gaps_in_words([]) == ""


def test_budgets_count_gaps_that_are_new_and_not_allowed() -> None:
    report, clean = scanned(both), scanned(nothing)

    def counted(found: Report, baseline: Report | None = None, **budgets: object) -> list[str]:
        made = Budgets(**budgets)  # type: ignore[arg-type]
        known = known_target("", baseline, measured_in(baseline), made) if baseline is not None else None
        return [breach.budget for breach in judge(found, measured_in(found), made, known).breaches]

    assert counted(report) == []
    assert counted(report, fail_on="gap") == ["AMP904", "AMP901"]
    assert counted(report, fail_on="gap", allow=("AMP904",)) == ["AMP901"]
    assert counted(report, clean, fail_on="gap") == ["AMP904", "AMP901"]
    assert counted(report, report, fail_on="gap") == []
    assert counted(clean, fail_on="gap") == []


def test_assert_safe_fails_on_a_gap() -> None:
    model = Wrap(opaque, a=nn.Linear(8, 8)).eval()
    ampaudit.assert_safe(model, X, policy="half")
    with pytest.raises(ampaudit.UnsafeModel, match="not audited inside"):
        ampaudit.assert_safe(model, X, policy="half", fail_on="gap")


def test_the_commands_fail_on_a_gap(cli: Cli, model_file: Callable[[str], Path], tmp_path: Path) -> None:
    path = model_file(FILE)
    passed = cli("scan", path, "--policy", "half", "-q")
    assert passed.returncode == 0
    assert WORDS in " ".join(passed.stdout.split())
    assert cli("scan", path, "--policy", "half", "--fail-on", "gap", "-q").returncode == 1
    (tmp_path / "pyproject.toml").write_text('[tool.ampaudit]\nfail-on = "gap"\npolicy = "half"\n')
    checked = cli("check", path, cwd=tmp_path)
    assert checked.returncode == 1
    assert "AMP904" in checked.stdout
    assert WORDS in " ".join(checked.stdout.split())


def test_what_has_no_gaps_does_not_take_the_word(cli: Cli, model_file: Callable[[str], Path]) -> None:
    assert cli("lint", model_file(FILE), "--fail-on", "gap").returncode == 2
    assert cli("train", model_file(FILE), "--fail-on", "gap").returncode == 2


def test_a_gap_fails_a_sweep_as_well() -> None:
    def inputs(length: int) -> torch.Tensor:
        return torch.linspace(-1, 1, length * 8).reshape(length, 8)

    swept = {"sweep": {"length": [2, 4, 8]}, "device": "cpu"}
    model = Wrap(opaque, a=nn.Linear(8, 8))
    assert ampaudit.scan(model, inputs, **swept).exit_code == 0
    assert ampaudit.scan(model, inputs, fail_on="gap", **swept).exit_code == 1


class Towers(nn.Module):
    """A text tower, a vision tower that text alone does not run, and a head that training alone uses."""

    def __init__(self) -> None:
        super().__init__()
        self.text = nn.Linear(8, 8)
        self.vision = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor, pixels: torch.Tensor | None = None) -> torch.Tensor:
        made: torch.Tensor = self.text(x)
        made = made if pixels is None else made + self.vision(pixels)
        return self.head(made) if self.training else made


class Experts(nn.Module):
    """Experts that are run one by one, as far as a token chose them."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList([nn.Linear(8, 8) for _ in range(4)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x.sum(-1) > 0).long()
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            if (chosen == number).any():
                made = made + expert(x)
        return made


class Stacked(nn.Module):
    """Experts in one parameter, of which those that a token chose are taken by their number."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        self.weights = nn.Parameter(torch.randn(4, 8, 8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x)
        for number in (x.sum(-1) > 0).long().unique():
            made = made + x @ self.weights[number]
        return made


class ChosenByTensor(Stacked):
    """The same, taken all at once, by the numbers of the experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = (x.sum(-1) > 0).long()
        made: torch.Tensor = self.inner(x)
        return made + (x.unsqueeze(1) @ self.weights.transpose(1, 2)[numbers]).squeeze(1)


class ChosenByMask(Stacked):
    """The same, taken by a mask over the experts."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers = (x.sum(-1) > 0).long()
        made: torch.Tensor = self.inner(x)
        return made + (x @ self.weights[torch.bincount(numbers, minlength=4) > 0]).sum(0)


class Grouped(Stacked):
    """The same, in one kernel for rows that are sorted by expert."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        numbers, order = (x.sum(-1) > 0).long().sort()
        ends = torch.bincount(numbers, minlength=4).cumsum(0).int()
        made: torch.Tensor = self.inner(x)
        return made + nn.functional.grouped_mm(
            x[order].to(torch.bfloat16), self.weights.to(torch.bfloat16), offs=ends
        )


class Tied(nn.Module):
    """Two names for one weight, of which one is used."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.first(x)
        return made


class Routed(nn.Module):
    """Rows go to the experts that they choose, and the others are called with no rows."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.ReLU()) for _ in range(3))
        self.order, self.threshold = nn.Parameter(torch.arange(3.0)), nn.Parameter(torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        chosen = (x > self.threshold).any(1).long() * self.order.argmax()
        made = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            rows = torch.where(chosen == number)[0]
            made.index_add_(0, rows, expert(x[rows]))
        return made


class Short(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.other = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made: torch.Tensor = self.inner(x) if x.shape[0] < 100 else self.other(x)
        return made


@pytest.mark.parametrize("make", [Stacked, ChosenByTensor, ChosenByMask, Grouped])
@pytest.mark.parametrize(("batches", "unused"), [([X.abs()], 3), ([X], 2), ([X.abs(), -X.abs()], 2)])
def test_experts_in_one_parameter_that_no_token_chose_are_a_gap(
    batches: list[torch.Tensor], unused: int, make: Callable[[], nn.Module]
) -> None:
    model = make().eval()
    for policy in ("half", "torch-cuda"):
        report = ampaudit.scan(model, batches=batches, policy=policy)
        (gap,) = (gap for gap in report.gaps if gap.kind is GapKind.NOT_RUN)
        assert gap.op == f"{unused} of 4 experts of (top module) ({unused * 64 / 320:.0%} of the weights)"


def share(model: nn.Module, *names: str) -> float:
    """The share of the parameters that these modules have."""
    sizes = {name: sum(p.numel() for p in model.get_submodule(name).parameters()) for name in ("", *names)}
    return sum(sizes[name] for name in names) / sizes[""]


@pytest.mark.parametrize(
    ("make", "batches", "never"),
    [
        (Towers, [(X,)], ["vision", "head"]),
        (Towers, [(X,), (X, X)], ["head"]),
        (Experts, [(X,)], ["experts.2", "experts.3"]),
        (Experts, [(X.abs(),)], ["experts.0", "experts.2", "experts.3"]),
        (Routed, [(X.abs(),)], ["experts.0", "experts.1"]),
        (Routed, [(X.abs(),), (-X.abs(),)], ["experts.1"]),
        (Routed, [(X[:0],)], ["experts"]),
        (Tied, [(X,)], []),
        (Short, [(X,)], ["other"]),
        (Short, [(X,), (X.repeat(30, 1),)], []),
    ],
)
def test_what_no_input_runs_is_a_gap_with_its_share_of_the_weights(
    make: Callable[[], nn.Module], batches: list[tuple[torch.Tensor, ...]], never: list[str]
) -> None:
    model = make().eval()
    report = ampaudit.scan(model, batches=batches, policy="half", fail_on="gap")
    gaps = [gap for gap in report.gaps if gap.kind is GapKind.NOT_RUN]
    assert report.gate == ("fail" if gaps else "pass")
    assert len(gaps) == bool(never)
    if never:
        assert gaps[0].op == f"{', '.join(never)} ({share(model, *never):.0%} of the weights)"
        assert gaps[0].op in report.headline
        assert [finding.code for finding in report.findings if finding.code == "AMP903"] == ["AMP903"]
