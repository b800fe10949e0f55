"""Causes, fates, ranks and suppressions of findings, and exact counts of weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import nn

from ampaudit import scan
from ampaudit.audit.checks import Finding
from ampaudit.core.errors import UsageError
from ampaudit.core.formats import format_named
from ampaudit.core.source_config import SourceConfig
from ampaudit.policy import load_policy
from ampaudit.report.model import Report
from ampaudit.run.weights import weight_ranges
from ampaudit.source.open import open_source
from ampaudit.trace import TraceConfig, trace
from ampaudit.trace.converted import attach_weights
from tests.support.planted import WIDTH


def graver(report: Report) -> list[Finding]:
    return [f for f in report.findings if f.severity != "note" and f.suppressed is None]


class Norm(nn.Module):
    """A root-mean-square norm by hand, on values whose squares overflow float16."""

    def __init__(self, shift: float) -> None:
        super().__init__()
        self.inner = nn.Linear(WIDTH, WIDTH)
        nn.init.constant_(self.inner.bias, shift)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(x)
        return hidden * torch.rsqrt(hidden.pow(2).mean(-1, keepdim=True) + 1e-4)


def test_a_norm_that_hides_its_overflow_is_an_error_that_says_where_it_is_hidden() -> None:
    report = scan(Norm(500.0).eval(), torch.randn(4, WIDTH), policy="half")
    (found,) = [f for f in report.findings if f.severity == "error"]
    assert (found.code, found.site, found.fate) == ("AMP106", "(top)/pow", "recovered")
    assert found.hidden_at == ("(top)/rsqrt",)
    assert not {site.site for site in report.nearest_sites} & {found.site, *found.hidden_at}
    assert "wrong (0 dB" in found.cause
    assert report.verdict == "fail"


def test_an_overflow_that_is_hidden_with_the_right_values_is_a_note() -> None:
    class Saturated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(x * 4e5)

    signs = torch.tensor([1.0, -1.0]).repeat(4, WIDTH // 2)
    report = scan(Saturated(), signs, policy="half")
    assert not graver(report)
    (found,) = [f for f in report.findings if f.origin]
    assert (found.severity, found.fate, found.hidden_at) == ("note", "recovered", ("(top)/tanh",))


def test_the_rounding_of_other_elements_does_not_make_a_hidden_overflow_wrong() -> None:
    """Half of the elements overflow and saturate; the other half lose their digits by cancellation."""

    class Saturated(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.tanh(torch.cat([x * 4e5, x * 2e3 - 2e3]))

    x = 1 + 1e-3 * torch.randn(4, WIDTH)
    report = scan(Saturated(), x, policy="half")
    (found,) = [f for f in report.findings if f.origin]
    assert (found.severity, found.fate, found.hidden_at) == ("note", "recovered", ("(top)/tanh",))


def test_an_overflow_that_reaches_the_output_says_so() -> None:
    class Plain(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 4e5 + 1

    (found,) = graver(scan(Plain(), 1 + torch.rand(4, WIDTH), policy="half"))
    assert (found.fate, found.hidden_at) == ("reaches the output", ())


class Quotient(nn.Module):
    def forward(self, image: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
        return image.flatten(1) / scale


@pytest.mark.parametrize(
    ("image", "scale", "code", "why"),
    [
        (1e6, 1e3, "AMP101", "image reaches 1,000,000"),
        (1e6, 1e6, "AMP101", "image reaches 1,000,000"),
        (1e-9, 1e-9, "AMP201", "flushed to 0"),
        (0.0, 1e-9, "AMP201", "values that are 0 in FP32 became NaN"),
    ],
)
def test_an_input_beyond_the_format_is_the_cause(image: float, scale: float, code: str, why: str) -> None:
    inputs = {"image": torch.full((2, 3), image), "scale": torch.full((3,), scale)}
    assert Quotient()(**inputs).isfinite().all()
    half = {name: value.half() for name, value in inputs.items()}
    assert half["image"].isinf().all() == (code == "AMP101")
    assert not Quotient().half()(**half).isfinite().any()
    (found,) = graver(scan(Quotient(), inputs, policy="half"))
    assert (found.code, found.site) == (code, "(top)/div")
    assert why in found.cause


class Chain(nn.Module):
    """Two hundred harmless ops, one of which may lose its precision."""

    def __init__(self, bad: int | None, count: int = 200) -> None:
        super().__init__()
        self.bad, self.count = bad, count

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for step in range(self.count):
            x = torch.sinh(torch.asinh(x)) if step % 2 else x * 1.001
            if step == self.bad:
                x = torch.frac(x + 300.25) - 0.25
        return x


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("bad", [3, 100, 190])
def test_one_bad_op_among_two_hundred_ranks_first(bad: int, dtype: str) -> None:
    x = torch.rand(8, WIDTH) * 0.4 + 0.1
    report = scan(Chain(bad), x, policy="half", dtype=dtype)
    first = next(f for f in report.findings if f.code in ("AMP205", "AMP208"))
    assert first.layer == ""
    assert first.op in ("aten.frac.default", "aten.sub.Tensor")
    # the output is wrong, too: the culprit is the op that rounds in front of the difference
    culprits = [f for f in report.findings if f.code == "AMP207"]
    assert all(f.op in ("aten.add.Tensor", "aten.frac.default") for f in culprits)
    assert report.findings.index(first) == len(culprits)
    assert len(culprits) == any(o.sqnr_db is not None and o.sqnr_db < 20 for o in report.outputs)


def test_a_healthy_chain_has_no_finding_about_precision() -> None:
    x = torch.rand(8, WIDTH) * 0.4 + 0.1
    assert not graver(scan(Chain(None, 40), x, policy="half"))


MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)
        nn.init.constant_(self.first.weight, 6e4)
        nn.init.constant_(self.second.weight, 6e4)

    def forward(self, x):
        a = self.first(x)  {comment}
        return a, self.second(x)

def example_inputs():
    return torch.ones(2, 8)
"""
Write = Callable[[str], Path]


def audited(path: Path, **options: list[str]) -> Report:
    return scan(
        open_source(str(path), SourceConfig()),
        policy="half",
        dtype="float16",
        ignore=options.get("ignore", []),
    )


@pytest.mark.parametrize(
    ("comment", "left"),
    [
        ("# ampaudit: ignore[AMP101] measured, see the paper", ["second"]),
        ("# ampaudit: ignore[AMP999, AMP101]", ["second"]),
        ("# ampaudit: ignore[AMP102] another code", ["first", "second", ""]),
        ("# no suppression: ignore[AMP101]", ["first", "second"]),
    ],
)
def test_a_comment_hides_the_findings_of_its_line(model_file: Write, comment: str, left: list[str]) -> None:
    report = audited(model_file(MODEL.format(comment=comment)))
    assert [f.layer for f in graver(report)] == left
    hidden = [f for f in report.findings if f.suppressed]
    assert all(f.suppressed and f.suppressed.startswith("comment: ") for f in hidden)
    assert len(report.findings) >= len(left)


def test_a_model_whose_findings_are_all_hidden_passes_and_still_lists_them(model_file: Write) -> None:
    report = audited(model_file(MODEL.format(comment="")), ignore=["AMP101:first", "amp101:sec*"])
    assert report.verdict == "pass"
    assert report.exit_code == 0
    assert [f.suppressed for f in report.findings] == ["--ignore AMP101:first", "--ignore amp101:sec*"]


def test_an_option_that_hides_nothing_is_reported(model_file: Write) -> None:
    report = audited(model_file(MODEL.format(comment="")), ignore=["AMP101", "AMP102", ":nowhere.*"])
    idle = [f for f in graver(report) if f.code == "AMP991"]
    assert ["AMP102" in f.cause or "nowhere" in f.layer for f in idle] == [True, True]


def test_a_code_that_does_not_exist_cannot_be_ignored(model_file: Write) -> None:
    with pytest.raises(UsageError, match="AMP199"):
        audited(model_file(MODEL.format(comment="")), ignore=["AMP199"])
    with pytest.raises(UsageError, match="neither"):
        audited(model_file(MODEL.format(comment="")), ignore=[""])


FORMATS = st.sampled_from(["float16", "bfloat16"])
NUMBERS = st.one_of(
    st.floats(-(2.0**20), 2.0**20, width=32),
    st.floats(-(2.0**-13), 2.0**-13, width=32),
    st.floats(-(2.0**-122), 2.0**-122, width=32, allow_subnormal=False),
    st.sampled_from([0.0, 65504.0, 65519.0, 65520.0, -65520.0, 6.1e-5, 5.96e-8, 2.98e-8, 2.99e-8]),
)


@hypothesis.settings(deadline=None)  # a trace takes what the machine gives it
@hypothesis.given(FORMATS, st.lists(NUMBERS, min_size=1, max_size=40))
def test_weights_are_counted_exactly(dtype: str, numbers: list[float]) -> None:
    """The oracle rounds number by number."""
    model = nn.Linear(len(numbers), 1, bias=False)
    with torch.no_grad():
        model.weight.copy_(torch.tensor([numbers]))
    form = format_named(dtype)
    traced = trace(
        model,
        (torch.zeros(1, len(numbers)),),
        {},
        TraceConfig(load_policy("half"), load_policy("torch-cuda"), form),
    )
    (seen,) = weight_ranges(attach_weights(traced), {})
    masters = model.weight.flatten().tolist()
    pairs = [(w, torch.tensor(w).to(getattr(torch, dtype)).double().item()) for w in masters]
    assert seen.nonzero == sum(w != 0 for w, _ in pairs)
    assert seen.overflow == sum(abs(h) == float("inf") for _, h in pairs)
    assert seen.vanish == sum(w != 0 and h == 0 for w, h in pairs)
    assert seen.subnormal == sum(0 < abs(h) < form.min_normal for _, h in pairs)


def test_weights_are_counted_over_several_blocks() -> None:
    model = nn.Linear(700, 800, bias=False)
    with torch.no_grad():
        model.weight.fill_(1.0)
        model.weight.view(-1)[::1000] = 1e-9
        model.weight.view(-1)[5::100000] = 1e9
        model.weight.view(-1)[7::1000] = 0.0
    form = format_named("float16")
    traced = trace(
        model, (torch.zeros(1, 700),), {}, TraceConfig(load_policy("half"), load_policy("torch-cuda"), form)
    )
    (seen,) = weight_ranges(attach_weights(traced), {})
    assert (seen.nonzero, seen.overflow, seen.vanish, seen.subnormal) == (559440, 6, 560, 0)
