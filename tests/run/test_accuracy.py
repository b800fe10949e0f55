"""Accuracy of outputs against numbers worked out apart; where errors enter; what the verdict says."""

from __future__ import annotations

import math
from fractions import Fraction
from io import StringIO

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

from ampaudit import scan
from ampaudit.core.errors import InputError
from ampaudit.render.render import for_terminal
from ampaudit.report.model import Report
from ampaudit.run.attribution import Attribution
from ampaudit.run.outputs import OutputComparison, compare_outputs, merge_outputs
from ampaudit.views.verdict import verdict_words

FLOATS = st.floats(-100.0, 100.0, width=32).map(lambda x: x if abs(x) > 1e-3 else 0.0)


def _one(reference: torch.Tensor, value: torch.Tensor) -> OutputComparison:
    return compare_outputs({"output": (reference, value)}, 0)["output"]


@given(pairs=st.lists(st.tuples(FLOATS, FLOATS), min_size=1, max_size=40))
@settings(max_examples=60, deadline=None)
def test_accuracy_is_that_of_exact_arithmetic(pairs: list[tuple[float, float]]) -> None:
    reference, value = (torch.tensor(side) for side in zip(*pairs, strict=True))
    error = sum((Fraction(b) - Fraction(a)) ** 2 for a, b in pairs)
    signal = sum(Fraction(a) ** 2 for a, _ in pairs)
    seen = _one(reference, value)
    if error == 0:
        assert seen.accuracy_db is None
    elif signal == 0:
        assert seen.accuracy_db == -math.inf
    else:
        assert seen.accuracy_db == pytest.approx(10 * math.log10(signal / error), abs=1e-3)


def test_the_variation_leaves_the_mean_out() -> None:
    reference = torch.linspace(999.0, 1001.0, 64)
    seen = _one(reference, reference.bfloat16().float())
    numbers = reference.double().numpy()
    error = reference.bfloat16().double().numpy() - numbers
    expected = 10 * np.log10(numbers.var() * 64 / np.square(error).sum())
    assert seen.variation_db == pytest.approx(expected, abs=1e-3)
    assert seen.accuracy_db is not None
    assert seen.accuracy_db > 50


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int8, torch.int16])
def test_short_integers_are_numbers(dtype: torch.dtype) -> None:
    reference = torch.arange(-100, 100).abs().to(dtype)
    off_by_one = _one(reference, reference + 1)
    signal = sum(n * n for n in map(int, reference))
    assert (off_by_one.kind, off_by_one.differing) == ("float", 0)
    assert off_by_one.accuracy_db == pytest.approx(10 * math.log10(signal / 200))
    assert _one(reference.to(torch.int64), reference.to(torch.int64) + 1).accuracy_db == 0.0


def test_pixels_may_be_off_by_one() -> None:
    class Image(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return (torch.sigmoid(self.layer(x)) * 255).round().to(torch.uint8)

    torch.manual_seed(0)
    model, x = Image(), torch.randn(8, 64)
    report = scan(model, x, policy="half", dtype="bfloat16")
    native = model.bfloat16()(x.bfloat16()).double()
    model.float()
    assert (native != model(x)).double().mean() > 0.1
    assert report.verdict == "pass"
    assert report.outputs[0].sqnr_db is not None
    assert report.outputs[0].sqnr_db > 40


def test_integers_are_counted_and_complex_numbers_are_pairs() -> None:
    counted = _one(torch.tensor([1, 2, 3, 4]), torch.tensor([1, 2, 0, 4]))
    assert (counted.kind, counted.differing) == ("integer", 1)
    assert counted.accuracy_db == pytest.approx(20 * math.log10(4))
    pairs = _one(torch.tensor([3.0 + 4.0j]), torch.tensor([3.0 + 3.5j]))
    assert (pairs.kind, pairs.accuracy_db) == ("complex", pytest.approx(20.0))


def test_what_cannot_be_compared_is_nothing_like_fp32() -> None:
    assert _one(torch.ones(2, 3), torch.ones(3, 2)).accuracy_db == -math.inf
    assert _one(torch.ones(3), torch.ones(3, dtype=torch.int64)).accuracy_db == -math.inf
    assert _one(torch.zeros(3), torch.tensor([0.0, 1e-3, 0.0])).accuracy_db == -math.inf
    assert _one(torch.ones(3), torch.tensor([1.0, math.nan, 1.0])).bad == 1
    assert _one(torch.ones(0, 3), torch.ones(0, 3)).accuracy_db is None


def test_the_worst_batch_counts() -> None:
    kept: dict[str, OutputComparison] = {}
    for number, factor in enumerate((1.0, 2.0, 1.5)):
        merge_outputs(kept, compare_outputs({"output": (torch.ones(4), factor * torch.ones(4))}, number))
    assert (kept["output"].batch, kept["output"].accuracy_db) == (1, 0.0)


class Planted(nn.Module):
    """Layers that nearly agree with each other; one of them adds an offset that its norm takes out again."""

    def __init__(self, count: int, bad: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(16, 16) for _ in range(count))
        self.bad = bad

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for index, layer in enumerate(self.layers):
            update = layer(x)
            if index == self.bad:
                update = update + 3000.0
                update = update - 3000.0
            x = x + 0.1 * torch.tanh(update)
        return x - x.mean()


@pytest.mark.parametrize("bad", [0, 13, 30])
def test_the_culprit_is_found_in_a_number_of_runs_that_grows_like_a_logarithm(
    bad: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    counts: list[int] = []
    original = Attribution._execute

    def counted(self: Attribution, *args: object, **kwargs: object) -> object:
        counts[-1] += 1
        return original(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Attribution, "_execute", counted)
    for layers in (31, 124):
        counts.append(0)
        torch.manual_seed(3)
        report = scan(Planted(layers, bad), torch.randn(8, 16), policy="half", dtype="bfloat16", min_sqnr=60)
        assert report.findings[0].op == "aten.add.Tensor"
        assert report.findings[0].source is not None
        assert report.findings[0].source.code == "update = update + 3000.0"
    # four times the ops: two more halvings, each of two runs
    assert counts[1] <= counts[0] + 8
    assert counts[0] <= 30


def _text(report: Report) -> str:
    out = StringIO()
    Console(file=out, width=200).print(for_terminal(report), crop=False)
    return out.getvalue()


class Returns(nn.Module):
    def __init__(self, make: object) -> None:
        super().__init__()
        self.inner, self.make = nn.Linear(16, 16), make

    def forward(self, x: torch.Tensor) -> object:
        return self.make(self.inner(x))  # type: ignore[operator]


@pytest.mark.parametrize(
    ("make", "code", "said"),
    [
        (lambda x: x * 0, 0, "output is 0 everywhere in FP32, which says nothing about its accuracy"),
        (lambda x: x * 0 + 7, 0, "output is 7 everywhere in FP32, which says nothing about its accuracy"),
        (lambda x: x[:0], 0, "output is empty"),
        (lambda x: (x * 0 + 100).long(), 0, "outputs are exact"),
        (lambda x: x.argsort(-1)[..., :1] * 0, 0, "outputs are exact"),
        (lambda x: torch.complex(x.float(), x.float() * 2), 0, "output has 5"),
        (lambda x: x * 0 + 1 + 2**-10 - 1 - 2**-10, 1, "output is 0 in FP32 and not in bfloat16"),
    ],
)
def test_outputs_of_which_little_can_be_told(make: object, code: int, said: str) -> None:
    torch.manual_seed(0)
    report = scan(Returns(make), torch.randn(32, 16), policy="half", dtype="bfloat16")
    assert report.exit_code == code
    assert said in verdict_words(report)[1]


def test_the_verdict_says_what_a_pass_rests_on() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4))
    report = scan(model, torch.randn(4, 16), policy="half", prove=True)
    word, sentence = verdict_words(report)
    (output,) = report.outputs
    assert word == "PASS"
    assert f"output has {output.sqnr_db:.0f} dB against FP32" in sentence
    assert "the least headroom is" in sentence
    assert f"{report.coverage.proved} of {report.coverage.sites} sites proved" in sentence


def test_a_finding_tells_how_near_the_choices_were() -> None:
    class Router(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Embedding(8, 16)

        def forward(self, scores: torch.Tensor) -> torch.Tensor:
            # 256 + k/4 for k < 8: bfloat16 counts in twos there, and the ties go to the first
            return self.table((scores * 0.25 + 256).argmax(-1))

    scores = torch.stack([torch.randperm(8) for _ in range(64)]).float()
    model = Router()
    report = scan(model, scores, policy="half", dtype="bfloat16")
    first = report.findings[0]
    assert (first.code, first.op) == ("AMP209", "aten.add.Tensor")
    low = (scores.bfloat16() * 0.25 + 256).argmax(-1)
    flipped = int((low != scores.argmax(-1)).sum())
    assert f"{flipped} of 64 differ, " in first.cause
    assert "steps of 2 at 257" in first.cause
    assert _text(report).splitlines()[2].startswith("FAIL  finite but wrong in bfloat16: output has ")


def test_an_error_that_counts_only_together_with_others_is_found_by_what_mends_it() -> None:
    """A divergence of two close distributions is quadratic in their difference."""

    class Divergence(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.student, self.drift = nn.Linear(16, 10), nn.Linear(16, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            s = self.student(x)
            moved = s + 0.01 * self.drift(x)
            p, q = torch.softmax(s, -1), torch.softmax(moved, -1)
            return (p * (p.log() - q.log())).sum(-1) * 1e4

    torch.manual_seed(0)
    model = Divergence().eval()
    x = torch.randn(12, 16)
    report = scan(model, x, policy="torch-cuda", dtype="bfloat16")
    first = report.findings[0]
    assert (first.code, first.severity) == ("AMP207", "error")
    assert first.source is not None
    assert first.source.code == "moved = s + 0.01 * self.drift(x)"


def test_a_buffer_that_has_converged_is_no_error() -> None:
    class Converged(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(8, 8)
            self.register_buffer("mean", torch.full((8,), 0.7))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.mean.mul_(0.999).add_(0.001 * 0.7)
            return self.inner(x)

    report = scan(Converged(), torch.randn(4, 8), policy="half", dtype="bfloat16")
    assert [f.code for f in report.findings if f.severity != "note"] == []


@pytest.mark.parametrize("make", [lambda x: None, lambda x: 3, lambda x: {"n": len(x)}])
def test_a_model_that_returns_no_tensor_is_refused(make: object) -> None:
    with pytest.raises(InputError, match="returns no tensor") as refused:
        scan(Returns(make), torch.randn(4, 16))
    assert refused.value.exit_code == 2
