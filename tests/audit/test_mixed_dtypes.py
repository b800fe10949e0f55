"""Dtypes that a kernel does not take together raise in a real ``.half()`` model, and are said to."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.testing._internal.common_methods_invocations import op_db
from torch.utils import _pytree as pytree

from ampaudit import scan
from ampaudit.audit.checks.interface import context_of
from ampaudit.audit.checks.model_code import first_refused
from ampaudit.audit.config import ScanConfig
from ampaudit.audit.inputs import as_source
from ampaudit.audit.scan import audit_policies
from ampaudit.core.formats import FLOAT16
from ampaudit.core.session import Session
from ampaudit.run.backends import Native
from ampaudit.trace.caster import MIXED_DTYPES
from tests.support.native import Call, Calls, Function, emulated, native, sample_calls

Body = Callable[[torch.Tensor], torch.Tensor]
# mixes that torch refuses, at least, in each part of its ops; more than 50 together
LEAST = (4, 4, 7, 9, 3, 9, 7, 4, 3, 4, 2, 3, 1, 5, 1, 3)
BODIES: dict[str, Body] = {
    "matmul": lambda x: x @ torch.eye(8),
    "matmul, agreeing": lambda x: x @ torch.eye(8, dtype=x.dtype),
    "bmm": lambda x: torch.bmm(x[None], torch.ones(1, 8, 8)),
    "mv": lambda x: torch.mv(x, torch.ones(8)),
    "addmm": lambda x: torch.addmm(torch.zeros(8), x, torch.eye(8)),
    "linear": lambda x: nn.functional.linear(x, torch.eye(8)),
    "index_add": lambda x: torch.zeros(4, 8).index_add(0, torch.tensor([0, 1, 2, 3]), x),
    "index_copy": lambda x: torch.zeros(4, 8).index_copy(0, torch.tensor([0, 1, 2, 3]), x),
    "scatter": lambda x: torch.zeros(4, 8).scatter(0, torch.zeros(4, 8, dtype=torch.long), x),
    "scatter_add": lambda x: torch.zeros(4, 8).scatter_add(0, torch.zeros(4, 8, dtype=torch.long), x),
    "index_put": lambda x: torch.zeros(4, 8).index_put((torch.arange(4),), x),
    "masked_scatter": lambda x: torch.zeros(4, 8).masked_scatter(torch.ones(4, 8, dtype=torch.bool), x),
    "attention": lambda x: nn.functional.scaled_dot_product_attention(x[None], torch.ones(1, 4, 8), x[None]),
    "conv1d": lambda x: nn.functional.conv1d(x[None], torch.ones(2, 4, 3)),
    "layer_norm": lambda x: nn.functional.layer_norm(x, (8,), torch.ones(8)),
    "add": lambda x: x + torch.ones(8),
    "where": lambda x: torch.where(x > 0, x, torch.ones(8)),
    "cat": lambda x: torch.cat([x, torch.ones(4, 8)]),
    "lerp": lambda x: torch.lerp(x, torch.ones(4, 8), 0.5),
    "dot": lambda x: torch.dot(x[0], torch.ones(8)),
    "cdist": lambda x: torch.cdist(x, torch.ones(4, 8)),
}


class Body16(nn.Module):
    def __init__(self, body: Body) -> None:
        super().__init__()
        self.inner, self.body = nn.Linear(8, 8), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.inner(x))


@pytest.mark.parametrize("name", BODIES)
def test_what_raises_in_a_half_model_is_an_error(name: str) -> None:
    model = Body16(BODIES[name])
    x = torch.randn(4, 8)
    try:
        copy.deepcopy(model).half()(x.half())
        raises = False
    except RuntimeError as error:
        raises = "not implemented" not in str(error)  # a missing kernel, which is AMP306
    report = scan(model, x, policy="half")
    errors = {f.code for f in report.findings if f.severity == "error"}
    assert errors - {"AMP306"} == ({"AMP307"} if raises else set())
    assert report.exit_code == int(bool(errors))


class Diffusion(nn.Module):
    """A convolution and a linear layer with a bias behind a float32 input, and layers that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.linear, self.out = nn.Conv2d(3, 8, 3), nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, again: bool = False) -> torch.Tensor:
        hidden = self.linear(self.conv(x.float()).mean((2, 3)))
        out: torch.Tensor = self.out(hidden.half().float() if again else hidden)
        return out


@pytest.mark.parametrize("again", [False, True])
def test_only_the_first_of_a_chain_is_reported(again: bool) -> None:
    model = Diffusion()
    report = scan(model, (torch.randn(2, 3, 8, 8), again), policy="half")
    expected = {("AMP307", "conv"), ("AMP307", "out")} if again else {("AMP307", "conv")}
    assert {(f.code, f.layer) for f in report.findings if f.severity == "error"} == expected
    with pytest.raises(RuntimeError) as raised:
        copy.deepcopy(model).half()(torch.randn(2, 3, 8, 8).half())
    assert str(raised.value) in report.findings[0].cause


def mixtures(call: Call) -> Iterator[tuple[Function, list[torch.Tensor]]]:
    """The call with its first float in float32 and the others in float16, and the other way round."""
    leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
    places = [
        i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()
    ]
    floats = [leaves[i] for i in places]
    if len(floats) < 2 or any(value.numel() == 0 or value.is_sparse_csr for value in floats):
        return
    for wide in (places[:1], places[1:]):

        def function(*given: torch.Tensor, wide: list[int] = wide) -> Any:
            mixed = dict(zip(places, given, strict=True))
            mixed.update({place: mixed[place].float() for place in wide})
            args, kwargs = pytree.tree_unflatten([mixed.get(i, leaf) for i, leaf in enumerate(leaves)], spec)
            return call.function(*args, **kwargs)

        yield function, floats


def raised(run: Callable[..., Any], function: Function, args: Sequence[Any]) -> str | None:
    try:
        run(function, tuple(args))
    except Exception as error:  # whatever torch or the trace raises
        return str(error).partition("\n")[0]
    return None


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", range(len(LEAST)))
def test_torchs_own_samples_are_judged_as_torch_judges_them(part: int) -> None:
    """Of each op with two floats: refused where torch raises for the mix and not for float16 alone."""
    wrong, mixed = [], 0
    for call in (
        call for info in op_db[part :: len(LEAST)] for call in sample_calls(info, 1, 1.0, torch.float16)
    ):
        alone = Calls(call.function, call.kwargs)
        for function, floats in mixtures(call):
            if raised(native, alone, call.args):
                continue
            expected = raised(native, function, floats)
            said: list[str] = []

            def judge(function: Function, floats: Any, said: list[str] = said) -> None:
                sites = emulated(function, floats).traced.sites
                said += [s.decision.why for s in sites if s.decision.reason == MIXED_DTYPES]

            failure = raised(judge, function, floats)
            if failure and raised(emulated, alone, call.args):
                continue  # the mix is not why
            mixed += bool(expected)
            if failure or bool(said) != bool(expected):
                wrong.append(f"{call.function}: torch {expected}, audit {failure or said}")
    assert not wrong, "\n".join(wrong)
    assert mixed >= LEAST[part]  # the samples have such calls


@pytest.mark.parametrize("returns", [False, True])
def test_a_policy_that_mixes_dtypes_is_told_from_one_that_torch_runs(returns: bool, tmp_path: Path) -> None:
    """Advice asks this of the rules that it proposes; the check keeps quiet about policies."""
    rule = "- {{id: {0}, match: {{site: [{1}]}}, cast: {2}, reason: range, why: w, source: s}}\n"
    rules = rule.format("keep", "'0/linear'", "float32")
    rules += rule.format("return", "'1/layer_norm'", "lower") if returns else ""
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\ntitle: mine\nextends: [half]\nrules:\n{rules}")
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    source = as_source(model, batches=[torch.randn(4, 8)])
    (made,) = audit_policies(source, [str(path)], ScanConfig())
    context = context_of(made.audit, FLOAT16, ScanConfig())
    assert {*first_refused(context.flow)} == (set() if returns else {"1/layer_norm"})
    assert all(f.code != "AMP307" for f in made.report.findings)


def assigned(x: torch.Tensor) -> torch.Tensor:
    y = x.clone()
    y[:, :2] = -1e9
    return y


def mask_of(x: torch.Tensor) -> torch.Tensor:
    return torch.ones_like(x, dtype=torch.bool).triu()


FILLED: dict[str, Body] = {
    "masked_fill": lambda x: x.masked_fill(mask_of(x), -1e9).softmax(-1),
    "masked_fill_": lambda x: x.clone().masked_fill_(mask_of(x), 1e5),
    "masked_fill, -inf": lambda x: x.masked_fill(mask_of(x), float("-inf")),
    "masked_fill, within the range": lambda x: x.masked_fill(mask_of(x), -65504.0),
    "fill_": lambda x: torch.empty_like(x).fill_(1e9) * x,
    "full_like": lambda x: torch.full_like(x, 7e4) * x,
    "new_full": lambda x: x.new_full((8,), 1e9) * x,
    "full": lambda x: torch.full((8,), 1e9, dtype=x.dtype, device=x.device) * x,
    "full in float32": lambda x: torch.full((8,), 1e9, device=x.device) * x,
    "pad": lambda x: nn.functional.pad(x, (1, 1), value=-1e9),
    "index_fill": lambda x: x.index_fill(0, torch.tensor([0], device=x.device), 1e9),
    "threshold": lambda x: nn.functional.threshold(x, 0.0, 1e9),
    "where": lambda x: torch.where(mask_of(x), x, -1e9),
    "where, number first": lambda x: torch.where(mask_of(x), 1e9, x),
    "where, two numbers": lambda x: torch.where(mask_of(x), 0.0, -1e9) + x.float(),
    "where, a tensor": lambda x: torch.where(mask_of(x), x, torch.tensor(-1e9)),
    "scatter": lambda x: x.scatter(1, torch.zeros_like(x, dtype=torch.long), -1e9),
    "hardshrink": lambda x: nn.functional.hardshrink(x, 1e9),
    "pow": lambda x: (x * 0 + 1).pow(1e9),
    "pow of a number": lambda x: torch.pow(1e9, x),
    "linspace": lambda x: torch.linspace(0.0, 1e9, 8, dtype=x.dtype, device=x.device) * x,
    "add": lambda x: x + 1e9,
    "mul": lambda x: x * 1e9,
    "comparison": lambda x: (x > 1e9) * x,
    "assigned": assigned,
}


# a CPU's kernel takes the number for an infinity
ON_CUDA_ALONE = ("where", "where, number first")


def refuses_the_number(name: str, dtype: torch.dtype, device: str) -> bool:
    """Return whether torch raises about the number in a model in 16 bits."""
    x = torch.randn(8, 8, device=device, dtype=dtype)
    try:
        with torch.no_grad():
            Body16(FILLED[name]).to(x.device, dtype)(x)
    except RuntimeError as error:
        if not re.search("without overflow|must be in range", str(error)):
            raise
        return True
    return False


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FILLED)
def test_a_number_that_the_format_does_not_hold_is_found_where_torch_raises(
    name: str, dtype: torch.dtype
) -> None:
    raises = refuses_the_number(name, dtype, "cpu") or (name in ON_CUDA_ALONE and dtype is torch.float16)
    report = scan(
        Body16(FILLED[name]), torch.randn(8, 8), policy="half", dtype=str(dtype).removeprefix("torch.")
    )
    assert [f.code for f in report.findings if f.code == "AMP308"] == (["AMP308"] if raises else [])
    if raises:
        assert report.verdict == "fail"


@pytest.mark.parametrize("name", ["masked_fill", "masked_fill_", "fill_", "index_fill"])
def test_the_native_run_goes_on_after_a_refused_number(name: str) -> None:
    report = scan(Body16(FILLED[name]), torch.randn(8, 8), policy="half", session=Session(backend=Native()))
    assert [f.code for f in report.findings if f.code == "AMP308"] == ["AMP308"]


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", FILLED)
def test_a_gpu_refuses_the_same_numbers(name: str, dtype: torch.dtype) -> None:
    on_cpu = refuses_the_number(name, dtype, "cpu")
    only_there = name in ON_CUDA_ALONE and dtype is torch.float16
    raises = refuses_the_number(name, dtype, "cuda")
    assert raises == (on_cpu or only_there)
    model, x = Body16(FILLED[name]).cuda(), torch.randn(8, 8, device="cuda")
    report = scan(model, x, policy="half", dtype=str(dtype).removeprefix("torch."), device="cuda")
    assert [f.code for f in report.findings if f.code == "AMP308"] == ["AMP308"] * raises


def test_what_a_policy_keeps_in_float32_may_be_filled_with_any_number() -> None:
    model, x = Body16(FILLED["masked_fill"]), torch.randn(8, 8)
    assert not [f for f in scan(model, x, policy="ampaudit").findings if f.code == "AMP308"]


class Mixing(nn.Module):
    """Multiplies values by weights that it computes in float32, which torch rejects in 16 bits."""

    def __init__(self) -> None:
        super().__init__()
        self.values, self.out = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        values = self.values(x)
        return x + self.out(torch.softmax(values.float(), -1) @ values)


class Large(nn.Module):
    """Overflows in float16, and returns small values again."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(8, 8), nn.LayerNorm(8)
        nn.init.normal_(self.up.weight, std=1e5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(x))


@pytest.mark.parametrize(
    "kinds",
    [(Mixing,), (Mixing, Mixing), (Mixing, Large), (Large, Mixing)],
    ids=["alone", "again", "before", "behind"],
)
def test_code_that_cures_runs_in_torch(kinds: tuple[type[nn.Module], ...]) -> None:
    """One correction does not cure an op behind it that mixes dtypes by itself, nor one elsewhere."""
    torch.manual_seed(0)
    model, x = nn.Sequential(*(kind() for kind in kinds), nn.LayerNorm(8)).eval(), torch.randn(8, 8)
    with pytest.raises(RuntimeError, match="dtype"):
        copy.deepcopy(model).half()(x.half())
    report = scan(model, x, policy="half", advise=True)
    assert report.combined is not None
    trials = [trial for finding in report.findings for trial in finding.tried]
    codes = [t.code for t in (*trials, report.combined) if t.outcome == "cure" and t.code]
    assert report.combined.code in codes
    for code in codes:
        changed = copy.deepcopy(model)
        exec(code, {"model": changed})
        torch.testing.assert_close(changed(x.half()).float(), model(x), rtol=0.01, atol=0.05)


@pytest.mark.parametrize("kept", ["0", "1.out", "2"])
def test_a_rule_does_not_excuse_what_the_code_mixes(kept: str, tmp_path: Path) -> None:
    """A layer that a rule keeps in float32, and returns to 16 bits, has no part in what another mixes."""
    rule = "- {{id: {0}, match: {{layer: ['{1}']}}, cast: {2}, reason: range, why: w, source: s}}\n"
    rules = rule.format("keep", kept, "float32") + rule.format("return", "1.values", "lower")
    path = tmp_path / "mine.yaml"
    path.write_text(f"name: mine\ntitle: mine\nextends: [half]\nrules:\n{rules}")
    model, x = nn.Sequential(nn.Linear(8, 8), Mixing(), nn.Linear(8, 8)), torch.randn(8, 8)
    real = copy.deepcopy(model).half()
    layer = real.get_submodule(kept).float()
    layer.register_forward_pre_hook(lambda _, args: (args[0].float(),))
    layer.register_forward_hook(lambda _, args, output: output.half())
    with pytest.raises(RuntimeError) as raised:
        real(x.half())
    report = scan(model, x, policy=str(path))
    (finding,) = (f for f in report.findings if f.code == "AMP307")
    assert finding.layer == "1"
    assert str(raised.value) in finding.cause
