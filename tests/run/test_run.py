"""The run: emulation against native kernels, local error, and leaving everything as it was."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.audit.checks import Severity
from ampaudit.core.errors import RunFailed
from ampaudit.core.formats import FLOAT16
from ampaudit.policy import load_policy
from ampaudit.report.model import Report, SiteReport
from ampaudit.run import runner as runner_module
from ampaudit.run.backends import Emulated, Native
from ampaudit.run.meter import FULL_CALL, Meter
from ampaudit.source import Batch, ModelSource
from ampaudit.trace import TraceConfig, trace
from ampaudit.trace.converted import attach_weights
from tests.support.native import run_converted
from tests.support.planted import WIDTH, TwoBranches
from tests.support.planted import scan_under_autocast as scan
from tests.support.zoo import ZOO


def audit_with(backend: Emulated | Native, model: nn.Module, batch: Batch, policy: str) -> Report:
    source = ModelSource("test", "object", model, (batch,))
    return ampaudit.scan(
        source, policy=policy, dtype="float16", device="cpu", session=ampaudit.Session(backend=backend)
    )


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
@pytest.mark.parametrize("name", ["bert", "llama", "t5", "resnet", "swin", "mamba"])
def test_emulated_and_native_kernels_agree(name: str, policy: str) -> None:
    """Peaks within a few roundings of each other at every site, and the same verdicts."""
    zoo = ZOO[name]()
    model = zoo.model.eval()
    emulated = audit_with(Emulated(), model, Batch((), zoo.kwargs), policy)
    native = audit_with(Native(), model, Batch((), zoo.kwargs), policy)
    assert [s.site for s in emulated.sites] == [s.site for s in native.sites]
    for ours, theirs in zip(emulated.sites, native.sites, strict=True):
        assert ours.verdict == theirs.verdict == "observed", ours.site
        assert (ours.forward is None) == (theirs.forward is None)
        if ours.forward is None or theirs.forward is None:
            continue
        assert ours.forward.peak == pytest.approx(theirs.forward.peak, rel=1e-6)
        if ours.forward.sqnr_db is not None and theirs.forward.sqnr_db is not None:
            # both are 16-bit runs: they err alike, by about one rounding per op
            assert ours.forward.sqnr_db == pytest.approx(theirs.forward.sqnr_db, abs=9), ours.site


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_native_and_emulated_name_the_same_origins(policy: str) -> None:
    model = TwoBranches(left=6e4, right=5e4).eval()
    batch = Batch((torch.randn(8, WIDTH) * 3,))
    for backend in (Emulated(), Native()):
        found = audit_with(backend, model, batch, policy).findings
        assert [f.site for f in found] == ["left.up/linear", "right.up/linear"]


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_numbers_fetched_at_the_end_are_those_measured_at_once(
    policy: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The way of a GPU, where nothing is looked at before the batch is over, taken on the CPU."""
    model = TwoBranches(left=6e4, right=5e4).eval()
    x = torch.randn(8, WIDTH) * 3
    at_once = scan(model, x, policy=policy)
    monkeypatch.setattr(Meter, "deferred", True)
    at_the_end = scan(model, x, policy=policy)
    assert [(f.code, f.site, f.poisons) for f in at_the_end.findings] == [
        (f.code, f.site, f.poisons) for f in at_once.findings
    ]
    for ours, theirs in zip(at_the_end.sites, at_once.sites, strict=True):
        assert ours.verdict == theirs.verdict
        if ours.forward is not None and theirs.forward is not None:
            assert ours.forward.inf == theirs.forward.inf
            assert ours.forward.nan == theirs.forward.nan
            assert ours.forward.peak == pytest.approx(theirs.forward.peak, rel=1e-3)


class OpsToCut(nn.Module):
    """Large enough that every op is called again on a part of its input only."""

    def __init__(self) -> None:
        super().__init__()
        self.conv = nn.Conv2d(3, 24, 3, stride=2, padding=1)
        self.norm2d = nn.BatchNorm2d(24)
        self.linear = nn.Linear(24, 32)
        self.norm = nn.LayerNorm(32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.norm2d(self.conv(x))
        x = self.norm(self.linear(x.flatten(2).transpose(1, 2)))
        scores = torch.softmax(torch.matmul(x, x.transpose(1, 2)) / 5.0, dim=-1)
        x = torch.matmul(scores, x)
        heads = x.unflatten(-1, (2, 16)).transpose(1, 2)
        heads = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return nn.functional.gelu(heads) * x.mean(-1)[:, None, :, None]


def test_local_error_of_a_cut_is_that_of_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    model = OpsToCut().eval()
    x = torch.randn(2, 3, 48, 48)
    cut = scan(model, x, policy="half")
    monkeypatch.setattr("ampaudit.run.meter.FULL_CALL", 1 << 40)
    whole = scan(model, x, policy="half")
    compared = 0
    for part, full in zip(cut.sites, whole.sites, strict=True):
        if part.forward is None or part.forward.local_sqnr_db is None:
            continue
        assert full.forward is not None
        assert part.forward.local_elements <= full.forward.local_elements
        if part.forward.local_elements < full.forward.local_elements:
            compared += 1
        assert part.forward.local_sqnr_db == pytest.approx(full.forward.local_sqnr_db, abs=3), part.site
    assert compared >= 9
    assert FULL_CALL < 2 * 24 * 24 * 24


def test_local_error_of_a_linear_against_its_definition() -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)).eval()
    x = torch.randn(32, WIDTH)
    report = scan(model, x, policy="half")
    site = next(s for s in report.sites if s.site == "1/linear")

    def low(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.detach().half().float()

    with torch.no_grad():
        hidden = model[0](x)
        expected = model[1](hidden).double()
        found = low(nn.functional.linear(low(hidden), low(model[1].weight), low(model[1].bias))).double()
    decibel = 10 * torch.log10(expected.square().sum() / (found - expected).square().sum())
    assert site.forward is not None
    assert site.forward.local_sqnr_db == pytest.approx(decibel.item(), abs=0.01)


def test_local_error_separates_the_cause_from_its_victims() -> None:
    """One op subtracts nearly equal numbers; everything after it inherits the error."""

    class Cancel(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.before = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
            self.after = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.before(x)
            return self.after((x + 1000.0) - 1000.0)

    report = scan(Cancel().eval(), torch.randn(32, WIDTH), policy="half")
    computed = [s for s in report.sites if s.forward is not None and s.forward.local_sqnr_db is not None]

    def lost(site: SiteReport) -> float:
        assert site.forward is not None
        return site.forward.local_sqnr_db or 0.0

    worst = min(computed, key=lost)
    assert worst.site == "(top)/sub"
    last = next(s for s in report.sites if s.site == "after.5/linear")
    assert last.forward is not None
    assert last.forward.sqnr_db is not None
    assert last.forward.local_sqnr_db is not None
    assert last.forward.sqnr_db < last.forward.local_sqnr_db - 20


def test_scanning_twice_gives_the_same_report() -> None:
    from dataclasses import replace

    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, 4)).train()
    x = torch.randn(8, WIDTH)
    first, second = (replace(scan(model, x, seed=3), timings={}) for _ in range(2))
    assert first == second


@pytest.mark.parametrize("name", ["resnet", "bert", "mamba"])
@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_observing_changes_nothing(name: str, policy: str) -> None:
    zoo = ZOO[name]()
    model = zoo.model.train()
    state = copy.deepcopy(model.state_dict())
    inputs = copy.deepcopy(zoo.kwargs)
    random = torch.get_rng_state()
    scan(model, zoo.kwargs, policy=policy)
    assert torch.equal(torch.get_rng_state(), random)
    for key, value in model.state_dict().items():
        assert torch.equal(value, state[key]), key
    for key, value in inputs.items():
        assert torch.equal(value, zoo.kwargs[key])
    assert model.training
    assert all(p.requires_grad and p.grad is None for p in model.parameters())


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_training_mode_draws_the_same_dropout_in_both_runs(policy: str) -> None:
    model = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Dropout(0.5), nn.Linear(WIDTH, WIDTH)).train()
    report = scan(model, torch.randn(64, WIDTH), policy=policy)
    dropped = next(s for s in report.sites if s.site == "1/dropout")
    assert dropped.forward is not None
    assert dropped.forward.sqnr_db is not None
    assert dropped.forward.sqnr_db > 50


def test_in_place_writes_reach_both_runs() -> None:
    class InPlace(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.first(x)
            z = y.clone().float()  # in FP32, y.float() would be y
            y[:, 0] = 7.0
            y.mul_(2.0)
            return y + z.to(y.dtype)

    model = InPlace().eval()
    x = torch.randn(4, WIDTH)
    for policy in ("torch-cuda", "half"):
        report = scan(model, x, policy=policy)
        assert report.count(Severity.ERROR) + report.count(Severity.WARNING) == 0
        assert report.outputs[0].sqnr_db is not None
        assert report.outputs[0].sqnr_db > 50


def test_the_converted_graph_runs_and_equals_real_half() -> None:
    zoo = ZOO["bert"]()
    model = zoo.model.eval()
    rules = load_policy("half")
    traced = trace(model, (), zoo.kwargs, TraceConfig(rules, load_policy("torch-cuda"), FLOAT16))
    with torch.no_grad():
        found = run_converted(traced, list(zoo.kwargs.values()))
        expected = copy.deepcopy(model).half()(**zoo.kwargs)
    assert found[0].dtype is torch.float16
    torch.testing.assert_close(found[0], expected.last_hidden_state, rtol=2e-2, atol=2e-2)


def test_masters_are_the_models_own_tensors_and_copies_are_half_as_large() -> None:
    zoo = ZOO["bert"]()
    rules = load_policy("half")
    converted = attach_weights(trace(zoo.model.eval(), (), zoo.kwargs, TraceConfig(rules, rules, FLOAT16)))
    parameters = {id(p) for p in zoo.model.parameters()}
    assert parameters <= {id(t) for t in converted.masters.values()} | {
        id(p) for n, p in zoo.model.named_parameters() if "position" in n
    }
    sizes = converted.weight_bytes
    assert any(not t.is_floating_point() for t in converted.masters.values())  # positions are no weights
    assert sizes["working"] * 2 == sizes["master"]


@pytest.mark.parametrize(("policy", "copies"), [("half", 144), ("torch-cuda", 288)])
def test_weights_replaced_by_another_16_bit_format_are_no_longer_held(policy: str, copies: int) -> None:
    x, model = torch.randn(4, 8).half(), nn.Linear(8, 8).half()
    report = ampaudit.scan(model, x, policy=policy, dtype="bfloat16")
    assert (report.weights.master_bytes, report.weights.working_bytes) == (0, copies)


class Enormous(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.ones(1 << 25, 1 << 25).sum() + x


def test_a_value_larger_than_the_memory_is_refused_before_the_run() -> None:
    with pytest.raises(RunFailed, match=r"ones.* computes a value of 4\.5 PB; cpu has") as caught:
        scan(Enormous(), torch.ones(2))
    assert caught.value.hint == "use a smaller batch"


@pytest.mark.parametrize("where", ["out of memory", "DefaultCPUAllocator: can't allocate memory"])
def test_out_of_memory_is_one_clear_error(monkeypatch: pytest.MonkeyPatch, where: str) -> None:
    def fails(*_: object) -> None:
        raise (torch.OutOfMemoryError if where == "out of memory" else RuntimeError)(where)

    monkeypatch.setattr(runner_module.LockStep, "run", fails)
    with pytest.raises(RunFailed, match="out of memory") as caught:
        scan(TwoBranches().eval(), torch.randn(2, WIDTH))
    assert "--ranges" in caught.value.hint


@pytest.mark.gpu
@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_cuda_and_emulated_verdicts_agree(policy: str) -> None:
    model = TwoBranches(left=6e4, right=5e4).eval()
    x = torch.randn(8, WIDTH) * 3
    native = scan(model, x, policy=policy, device="cuda")
    emulated = scan(model, x, policy=policy, device="cpu")
    assert native.run.backend == "native"
    assert [(s.site, s.verdict) for s in native.sites] == [(s.site, s.verdict) for s in emulated.sites]
