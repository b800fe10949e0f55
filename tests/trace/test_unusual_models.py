"""Models with something unusual in them: they trace, run, and agree with torch's own ``.half()``."""

from __future__ import annotations

import copy
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrizations
from torch.utils import checkpoint

import ampaudit
from ampaudit.core.errors import SourceError
from ampaudit.core.formats import FLOAT16
from ampaudit.policy import load_policy
from ampaudit.run.backends import Emulated, Native
from ampaudit.source import Batch, ModelSource
from ampaudit.trace import TraceConfig, trace
from tests.support.oracle import after_half, ours
from tests.support.planted import scan_under_autocast as scan
from tests.support.wrap import Scale, Wrap, linear

X = (4, 8)


class Irrep(tuple[int, ...]):
    """A tuple without a length, as in e3nn."""

    def __len__(self) -> int:
        raise NotImplementedError


def linear_with(attribute: object) -> nn.Module:
    model = Wrap(lambda m, x: m.a(x), a=nn.Linear(8, 8))
    model.attribute = attribute
    return model


CASES: dict[str, tuple[Callable[[], nn.Module], Callable[[], dict[str, Any] | tuple[Any, ...]]]] = {
    "tuple without a length": (lambda: linear_with(Irrep((1, -1))), lambda: (torch.randn(X),)),
    "gru cell": (
        lambda: Wrap(lambda m, x: m.cell(x, torch.zeros_like(x)), cell=nn.GRUCell(8, 8)),
        lambda: (torch.randn(X),),
    ),
    "attention": (
        lambda: Wrap(lambda m, x: m.a(x, x, x)[0], a=nn.MultiheadAttention(8, 2, batch_first=True)),
        lambda: (torch.randn(2, 5, 8),),
    ),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, batch_first=True),
        lambda: (torch.randn(2, 5, 8),),
    ),
    "padding same": (lambda: nn.Conv2d(3, 4, 3, padding="same"), lambda: (torch.randn(2, 3, 8, 8),)),
    "depthwise": (lambda: nn.Conv2d(8, 8, 3, groups=8), lambda: (torch.randn(2, 8, 8, 8),)),
    "transposed": (lambda: nn.ConvTranspose2d(3, 4, 3, stride=2), lambda: (torch.randn(2, 3, 8, 8),)),
    "upsample": (
        lambda: Wrap(
            lambda m, x: F.interpolate(m.c(x), scale_factor=2, mode="bilinear"), c=nn.Conv2d(3, 4, 1)
        ),
        lambda: (torch.randn(2, 3, 4, 4),),
    ),
    "norms": (
        lambda: nn.Sequential(
            nn.GroupNorm(2, 8), nn.InstanceNorm1d(8), nn.RMSNorm(6), nn.LocalResponseNorm(2)
        ),
        lambda: (torch.randn(2, 8, 6),),
    ),
    "embedding bag": (lambda: nn.EmbeddingBag(10, 8), lambda: (torch.randint(0, 10, (2, 5)),)),
    "weight norm": (lambda: parametrizations.weight_norm(linear()), lambda: (torch.randn(X),)),
    "shared layer": (lambda: Wrap(lambda m, x: m.a(m.a(x)), a=linear()), lambda: (torch.randn(X),)),
    "einsum": (
        lambda: Wrap(lambda m, x: torch.einsum("bi,bj->ij", m.a(x), x), a=linear()),
        lambda: (torch.randn(X),),
    ),
    "autograd function": (
        lambda: Wrap(lambda m, x: Scale.apply(m.a(x)), a=linear()),
        lambda: (torch.randn(X),),
    ),
    "checkpointed": (
        lambda: Wrap(lambda m, x: checkpoint.checkpoint(m.a, x, use_reentrant=False), a=linear()),
        lambda: (torch.randn(X),),
    ),
    "returns its input": (lambda: Wrap(lambda m, x: (x, m.a(x), x), a=linear()), lambda: (torch.randn(X),)),
    "scalar output": (lambda: Wrap(lambda m, x: m.a(x).mean(), a=linear()), lambda: (torch.randn(X),)),
    "empty tensor": (lambda: Wrap(lambda m, x: m.a(x).sum(), a=linear()), lambda: (torch.randn(0, 8),)),
    "none and flags": (
        lambda: Wrap(lambda m, x, mask=None, double=False: m.a(x) * (2 if double else 1), a=linear()),
        lambda: {"x": torch.randn(X), "mask": None, "double": True},
    ),
    "nested inputs": (
        lambda: Wrap(lambda m, pair, more: m.a(pair[0]) + pair[1]["y"] + more["z"], a=linear()),
        lambda: {"pair": (torch.randn(X), {"y": torch.randn(X)}), "more": {"z": torch.randn(X)}},
    ),
    "losses": (
        lambda: Wrap(
            lambda m, x: (
                F.cross_entropy(m.a(x), torch.arange(4)) + F.mse_loss(m.a(x), x) + F.smooth_l1_loss(x, m.a(x))
            ),
            a=linear(),
        ),
        lambda: (torch.randn(X),),
    ),
    "sort and gather": (
        lambda: Wrap(lambda m, x: m.a(x).sort(-1).values.cumsum(-1) + m.a(x).topk(8).values, a=linear()),
        lambda: (torch.randn(X),),
    ),
    "many activations": (
        lambda: nn.Sequential(
            linear(), nn.Mish(), nn.SELU(), nn.CELU(), nn.Softplus(), nn.Hardswish(), nn.GLU(),
            nn.LogSigmoid(), nn.PReLU(),
        ),
        lambda: (torch.randn(X),),
    ),
}  # fmt: skip


def as_kwargs(inputs: dict[str, Any] | tuple[Any, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return ((), inputs) if isinstance(inputs, dict) else (inputs, {})


@pytest.mark.parametrize("train", [False, True], ids=["eval", "train"])
@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
@pytest.mark.parametrize("name", CASES)
def test_it_is_audited_and_healthy(name: str, policy: str, train: bool) -> None:
    build, inputs = CASES[name]
    report = scan(build().train(train), inputs(), policy=policy)
    unused = ["AMP903"] if name == "empty tensor" else []  # no value has met the weights
    assert [finding.code for finding in report.findings] == unused, report.findings
    assert report.coverage.audited == report.coverage.sites
    for output in report.outputs:
        assert output.sqnr_db is None or output.sqnr_db > 40


@pytest.mark.parametrize("name", CASES)
def test_its_dtypes_are_those_of_a_half_model(name: str) -> None:
    build, inputs = CASES[name]
    model = build().eval().requires_grad_(False)
    args, kwargs = as_kwargs(inputs())
    rules = load_policy("half")
    found = ours(trace(model, args, kwargs, TraceConfig(rules, rules, FLOAT16)))
    names = {f"input{i}": value for i, value in enumerate(args)}
    plain = Wrap(lambda m, **k: m.model(*k.values()), model=copy.deepcopy(model)) if args else model
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        expected = after_half(plain, names or kwargs, torch.float16)
    # a real half trace keeps composite ops whole that ampaudit takes apart: compare what both have
    whole = {op for op, _ in expected} & {op for op, _ in found}
    assert [pair for pair in found if pair[0] in whole] == [pair for pair in expected if pair[0] in whole]
    assert len(whole) >= 1


@pytest.mark.parametrize("policy", ["apex-o1", "strongly-typed", "16-bit"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_take_inputs_in_16_bits_where_ops_are_cast(
    kind: Callable[..., nn.Module], policy: str
) -> None:
    model = nn.Sequential(nn.Linear(8, 8), kind(8, 8, batch_first=True)).eval()
    report = scan(model, torch.randn(2, 3, 8), policy=policy)
    assert report.verdict == "pass"
    assert report.low_precision_sites


@pytest.mark.parametrize("policy", ["ampaudit", "half", "modelopt"])
@pytest.mark.parametrize("kind", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_networks_are_taken_apart(kind: Callable[..., nn.Module], policy: str) -> None:
    report = scan(kind(8, 8, batch_first=True).eval(), torch.randn(2, 3, 8), policy=policy)
    assert report.verdict == "pass"
    assert report.coverage.sites > 10


def test_control_flow_operators_are_counted_as_not_covered() -> None:
    def branch(model: nn.Module, x: torch.Tensor) -> Any:
        return torch.cond(x.sum() > 0, lambda v: v + 1, lambda v: v - 1, (model.a(x),))

    report = scan(Wrap(branch, a=linear()).eval(), torch.randn(X), policy="half")
    assert report.coverage.uncovered_ops == ("cond",)
    assert [f.code for f in report.findings] == ["AMP901"]


def test_a_model_that_is_already_half_is_audited_as_it_is() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)).half().eval()
    batch = Batch((torch.randn(4, 8).half(),))
    for policy in ("half", "torch-cuda"):
        for backend in (Emulated(), Native()):
            source = ModelSource("half", "object", model, (batch,))
            report = ampaudit.scan(
                source,
                policy=policy,
                dtype="float16",
                device="cpu",
                session=ampaudit.Session(backend=backend),
            )
            assert report.findings == ()
            assert report.outputs[0].sqnr_db is not None


def test_what_a_model_prints_is_not_on_stdout(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        print("printed")
        return m.a(x)

    ampaudit.convert(Wrap(forward, a=nn.Linear(8, 8)).eval(), torch.randn(X), tmp_path / "out")
    printed = capsys.readouterr()
    assert (printed.out, "printed" in printed.err) == ("", True)


def test_a_model_that_runs_only_while_it_is_exported_is_not_converted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # where the audit is kept

    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        if not torch.compiler.is_exporting():
            raise ValueError("no eager kernel")
        return m.a(x)

    with pytest.raises(SourceError, match="no eager kernel"):
        ampaudit.convert(Wrap(forward, a=nn.Linear(8, 8)).eval(), torch.randn(X), tmp_path / "out")
    assert not (tmp_path / "out").exists()
