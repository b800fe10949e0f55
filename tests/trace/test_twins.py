"""Twins: what a custom op computes inside is audited through a function that is compared with its kernel."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit import scan
from ampaudit.core.errors import SourceError, UsageError
from ampaudit.findings.finding import GapKind
from ampaudit.report.model import Report
from ampaudit.source import twins as twin_files
from ampaudit.trace import twins
from ampaudit.trace.twins import TwinCheck
from tests.support.wrap import Wrap

LIB = "ampaudit_twins"
X = torch.linspace(-2, 2, 32).reshape(4, 8)


RULES = f"""
name: wide
title: half, with one op in float32
extends: [half]
rules:
  - id: wide/softmax
    match: {{op: ["{LIB}::softmax"]}}
    cast: float32
    reason: range
    why: it does not subtract the maximum.
    source: this test
"""
PACKAGED = f"""
import ampaudit

@ampaudit.twin("{LIB}::softmax")
def plain(x, scale):
    return (x * scale).softmax(-1)
"""


def custom_op(name: str, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    return torch.library.custom_op(f"{LIB}::{name}", **{"mutates_args": (), **options})


@custom_op("softmax")
def softmax(x: torch.Tensor, scale: float) -> torch.Tensor:
    powers = torch.exp(x * scale)
    return powers / powers.sum(-1, keepdim=True)


@custom_op("cuda_only", device_types="cuda")
def cuda_only(x: torch.Tensor) -> torch.Tensor:
    return x * 1e5


@custom_op("two")
def two(x: torch.Tensor, ys: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    return x.sum(-1), torch.stack(ys).sum(0)


@custom_op("scale_", mutates_args=("x",))
def scale_(x: torch.Tensor, factor: float) -> None:
    x.mul_(factor)


@custom_op("noisy")
def noisy(x: torch.Tensor) -> torch.Tensor:
    return x + torch.rand_like(x)


@custom_op("smooth")
def smooth(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(x)


smooth.register_fake(torch.empty_like)
smooth.register_autograd(
    lambda ctx, grad: grad * torch.autograd.functional.jacobian(torch.nn.functional.silu, ctx.x).diagonal()
)


@pytest.fixture(autouse=True)
def _no_twins(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(twins, "_TWINS", {})


def plain_softmax(x: torch.Tensor, scale: float) -> torch.Tensor:
    powers = torch.exp(x * scale)  # line A
    return powers / powers.sum(-1, keepdim=True)


def identity() -> nn.Linear:
    made = nn.Linear(8, 8, bias=False)
    with torch.no_grad():
        made.weight.copy_(torch.eye(8))
    return made


def scanned(call: Callable[[torch.Tensor], Any], policy: str = "half", **options: Any) -> Report:
    model = Wrap(lambda model, x: call(model.a(x)), a=identity()).eval()
    report = scan(model, X, policy=policy, **options)
    assert isinstance(report, Report)
    return report


def line_of(function: Callable[..., Any], offset: int) -> int:
    return function.__code__.co_firstlineno + offset


@pytest.mark.parametrize("policy", ["half", "torch-cuda", "ampaudit"])
def test_an_overflow_inside_is_found_at_its_line(policy: str) -> None:
    ampaudit.twin(f"{LIB}::softmax", plain_softmax)
    call = lambda x: softmax(x.half(), 30.0)  # noqa: E731
    report = scanned(call, policy)
    errors = [f for f in report.findings if f.severity == "error"]
    found = next(f for f in errors if f.op.startswith("aten.exp"))
    assert found.source is not None
    assert found.source.line == line_of(plain_softmax, 1)
    assert found.source.caller is not None
    assert found.source.caller.code.startswith("call = lambda x: softmax")
    assert found.site == f"(top)/{LIB}::softmax/exp"
    assert (report.gaps, [f for f in report.findings if f.code in ("AMP902", "AMP904")]) == ((), [])


def test_without_a_twin_it_is_a_gap() -> None:
    softmax.register_fake(lambda x, scale: torch.empty_like(x))
    (gap,) = scanned(lambda x: softmax(x, 3.0)).gaps
    assert (gap.kind, gap.site) == (GapKind.OPAQUE, f"(top)/{LIB}::softmax")


def test_the_inside_is_what_the_function_computes_in_16_bits() -> None:
    ampaudit.twin(f"{LIB}::softmax", plain_softmax)
    kept: dict[int, Any] = {}
    report = scanned(lambda x: softmax(x, 3.0), session=ampaudit.Session(keep_outputs=kept.__setitem__))
    names = [site.site.rpartition("/")[2] for site in report.sites if f"{LIB}::softmax/" in site.site]
    assert names == ["mul", "exp", "sum", "div"]
    assert torch.equal(kept[0]["output"][0], plain_softmax(X, 3.0))
    assert torch.allclose(kept[0]["output"][1], plain_softmax(X.half(), 3.0).float(), atol=1e-3)


def test_a_converter_decides_about_the_inside_as_about_other_ops() -> None:
    """It sees the graph, in which the op is taken apart."""
    ampaudit.twin(f"{LIB}::softmax", plain_softmax)
    report = scanned(lambda x: softmax(x, 3.0), "modelopt")
    (power,) = [site for site in report.sites if site.site == f"(top)/{LIB}::softmax/exp"]
    assert power.reason != "twin"
    assert power.source is not None
    assert power.source.line == line_of(plain_softmax, 1)
    assert power.source.caller is not None


def test_a_rule_about_the_op_decides_about_its_inside(tmp_path: Path) -> None:
    ampaudit.twin(f"{LIB}::softmax", plain_softmax)
    assert scanned(lambda x: softmax(x, 30.0)).exit_code == 1
    path = tmp_path / "rules.yaml"
    path.write_text(RULES)
    report = scanned(lambda x: softmax(x, 30.0), str(path))
    assert report.exit_code == 0
    assert {s.precision for s in report.sites if f"{LIB}::softmax/" in s.site} == {"float32"}


def test_advice_on_an_op_inside_keeps_the_op_in_float32() -> None:
    """No rule reaches an op of a twin by itself."""
    ampaudit.twin(f"{LIB}::softmax", plain_softmax)
    model = nn.Sequential(identity(), Wrap(lambda model, x: softmax(x, 30.0)), identity()).eval()
    report = scan(model, X, policy="half", advise=True)
    tried = next(f for f in report.findings if f.severity == "error").tried
    (cure,) = [trial for trial in tried if trial.kind == "rule" and trial.outcome == "cure"]
    assert f'site: ["1/{LIB}::softmax"]' in cure.paste
    assert '"2/linear"' in cure.paste  # which takes 16 bits again, as its weights are


def test_without_twin_and_kernel_the_error_says_what_to_do() -> None:
    cuda_only.register_fake(torch.empty_like)
    with pytest.raises(SourceError, match=f"{LIB}::cuda_only has no kernel for CPU") as caught:
        scanned(cuda_only)
    assert f"ampaudit.twin('{LIB}::cuda_only', function)" in caught.value.hint


def test_one_without_a_kernel_here_is_audited_and_said_to_be_unchecked() -> None:
    ampaudit.twin(f"{LIB}::cuda_only", lambda x: x * 1e5)
    report = scanned(cuda_only)
    assert [f.code for f in report.findings if f.severity == "error"] == ["AMP101"]
    (gap,) = report.gaps
    assert (gap.kind, gap.op, gap.kind.code) == (GapKind.UNCHECKED_TWIN, f"{LIB}::cuda_only", "AMP905")
    assert gap.reason == "it has no kernel on this device"
    assert "audited by an unchecked twin" in report.headline
    assert scanned(cuda_only, fail_on="gap", ignore=["AMP905", "AMP1"]).exit_code == 0


def test_nothing_is_checked_where_nothing_is_run() -> None:
    ampaudit.twin(f"{LIB}::softmax", plain_softmax)
    (gap,) = scanned(lambda x: softmax(x, 3.0), static=True).gaps
    assert (gap.kind, gap.reason) == (GapKind.UNCHECKED_TWIN, "nothing was run")
    assert scanned(lambda x: softmax(x, 3.0), ranges=True).gaps == ()


def test_each_kind_of_arguments_is_checked_once() -> None:
    calls: list[tuple[int, ...]] = []

    def counted(x: torch.Tensor, scale: float) -> torch.Tensor:
        calls.append(tuple(x.shape))
        return plain_softmax(x, scale)

    ampaudit.twin(f"{LIB}::softmax", counted)
    with twins.with_twins(), TwinCheck():
        for rows in (2, 2, 3):
            softmax(X[:rows].clone(), 3.0)
    assert calls == [(2, 8), (3, 8)]


def test_an_op_that_writes_to_its_argument_has_a_twin_that_does() -> None:
    def plain(x: torch.Tensor, factor: float) -> None:
        x.copy_(x * factor)

    ampaudit.twin(f"{LIB}::scale_", plain)

    def call(x: torch.Tensor) -> torch.Tensor:
        scale_(x, 1e5)
        return x / 1e5

    report = scanned(call)
    first = next(f for f in report.findings if f.severity == "error")
    assert first.source is not None
    assert first.source.line == line_of(plain, 1)
    assert report.gaps == ()


def test_a_twin_takes_the_defaults_of_the_op() -> None:
    @custom_op("defaults")
    def defaults(x: torch.Tensor, scale: float = 2.0, *, offset: int = 3) -> torch.Tensor:
        return x * scale + offset

    ampaudit.twin(f"{LIB}::defaults", lambda x, scale, *, offset: x * scale + offset)
    for kwargs in ({}, {"scale": 5.0}, {"offset": 7}):
        kept: dict[int, Any] = {}
        scanned(
            lambda x, kwargs=kwargs: defaults(x, **kwargs),  # type: ignore[misc]
            session=ampaudit.Session(keep_outputs=kept.__setitem__),
        )
        assert torch.equal(kept[0]["output"][0], defaults(X, **kwargs))


def test_a_twin_may_call_another_op_with_a_twin() -> None:
    @custom_op("doubled")
    def doubled(x: torch.Tensor) -> torch.Tensor:
        return softmax(x, 3.0) * 2

    ampaudit.twin(f"{LIB}::softmax", plain_softmax)
    ampaudit.twin(f"{LIB}::doubled", lambda x: softmax(x, 3.0) * 2)
    report = scanned(doubled)
    (power,) = [site for site in report.sites if site.op == "aten.exp.default"]
    assert power.site == f"(top)/{LIB}::doubled/{LIB}::softmax/exp"
    assert power.source is not None
    assert power.source.line == line_of(plain_softmax, 1)
    assert power.source.caller is not None
    assert "scanned(doubled)" not in power.source.caller.code  # the line of the model


def test_a_twin_that_decides_by_values_keeps_the_names_of_its_ops() -> None:
    @custom_op("branching")
    def branching(x: torch.Tensor) -> torch.Tensor:
        return x * 2 if bool(x.sum() > -1) else x * 3

    ampaudit.twin(f"{LIB}::branching", lambda x: x * 2 if bool(x.sum() > -1) else x * 3)
    report = scanned(branching)
    inside = [site.site for site in report.sites if f"{LIB}::branching" in site.site]
    assert inside == [f"(top)/{LIB}::branching/sum", f"(top)/{LIB}::branching/mul"]


def test_several_results_and_lists_of_tensors() -> None:
    ampaudit.twin(f"{LIB}::two", lambda x, ys: [x.sum(-1), torch.stack(ys).sum(0)])
    kept: dict[int, Any] = {}
    report = scanned(lambda x: two(x, [x, x + 1]), session=ampaudit.Session(keep_outputs=kept.__setitem__))
    assert report.gaps == ()
    assert torch.equal(kept[0]["output[1]"][0], X + (X + 1))


def test_an_op_that_draws_random_numbers_agrees_with_a_twin_that_does() -> None:
    ampaudit.twin(f"{LIB}::noisy", lambda x: torch.rand_like(x) + x)
    assert scanned(noisy).gaps == ()


def test_gradients_pass_through_the_twin() -> None:
    ampaudit.twin(f"{LIB}::smooth", lambda x: x * torch.sigmoid(x))
    model = Wrap(lambda model, x: smooth(model.a(x)).sum(), a=identity())
    report = scan(model, X, policy="half", backward=True, loss_scale=1.0)
    assert report.backward is not None
    inside = [s for s in report.sites if f"{LIB}::smooth/" in s.site]
    assert len(inside) == 2
    assert all(site.gradient is not None for site in inside)


def test_the_twin_may_return_its_argument_or_other_strides() -> None:
    @custom_op("copied")
    def copied(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @custom_op("turned")
    def turned(x: torch.Tensor) -> torch.Tensor:
        return x.t().contiguous()

    copied.register_fake(torch.empty_like)
    turned.register_fake(lambda x: x.new_empty(x.shape[::-1]))
    ampaudit.twin(f"{LIB}::copied", lambda x: x)
    ampaudit.twin(f"{LIB}::turned", lambda x: x.t())

    def call(x: torch.Tensor) -> Any:
        made = copied(x)
        made.mul_(3)
        return made, x, turned(x).view(-1)

    kept: dict[int, Any] = {}
    scanned(call, session=ampaudit.Session(keep_outputs=kept.__setitem__))
    outputs = {name: pair[0] for name, pair in kept[0].items()}
    assert torch.equal(outputs["output[0]"], X * 3)
    assert torch.equal(outputs["output[1]"], X)
    assert torch.equal(outputs["output[2]"], X.t().reshape(-1))


def wrong_shape(x: torch.Tensor, scale: float) -> torch.Tensor:
    return plain_softmax(x, scale)[:1]


def wrong_dtype(x: torch.Tensor, scale: float) -> torch.Tensor:
    return plain_softmax(x, scale).double()


def wrong_number(x: torch.Tensor, scale: float) -> Any:
    return plain_softmax(x, scale), x


def wrong_type(x: torch.Tensor, scale: float) -> Any:
    return "garbage"


def nothing(x: torch.Tensor, scale: float) -> Any:
    return None


def wrong_value(x: torch.Tensor, scale: float) -> torch.Tensor:
    return plain_softmax(x, scale * 1.01)


def wrong_element(x: torch.Tensor, scale: float) -> torch.Tensor:
    made = plain_softmax(x, scale).clone()
    made[0, 0] += 0.01
    return made


def not_finite(x: torch.Tensor, scale: float) -> torch.Tensor:
    return plain_softmax(x, scale) / 0


def writes(x: torch.Tensor, scale: float) -> torch.Tensor:
    return torch.exp(x.mul_(scale)) / torch.exp(x).sum(-1, keepdim=True)


def raises(x: torch.Tensor, scale: float) -> torch.Tensor:
    raise ValueError("no\nway")


def fails(x: torch.Tensor, scale: float) -> torch.Tensor:
    return x @ x


def calls_itself(x: torch.Tensor, scale: float) -> torch.Tensor:
    return softmax(x, scale)


def takes_less(x: torch.Tensor) -> torch.Tensor:
    return x


HOSTILE: dict[Callable[..., Any], tuple[int, str]] = {
    wrong_shape: (0, r"returns float\d+\[1, 8\]; the op returns float\d+\[4, 8\]"),
    wrong_dtype: (0, r"returns float64\[4, 8\]; the op returns float"),
    wrong_number: (0, "returns 2 values; the op returns a tensor"),
    wrong_type: (0, "returns str; the op returns a tensor"),
    nothing: (0, "returns nothing; the op returns a tensor"),
    wrong_value: (0, r"computes something else: .* instead of .* \(\d+ of 32 values differ\)"),
    wrong_element: (0, r"computes something else: .* \(1 of 32 values differ\)"),
    not_finite: (0, "computes something else: inf instead of"),
    writes: (0, "changes an argument that the op leaves alone"),
    raises: (1, "raises ValueError: no"),
    fails: (1, "raises RuntimeError: .*"),
    takes_less: (0, "does not take the arguments of .*: too many positional arguments"),
}


@pytest.mark.parametrize("described", [True, False])
@pytest.mark.parametrize("function", HOSTILE, ids=lambda function: function.__name__)
def test_a_twin_that_is_none_is_one_line(
    function: Callable[..., Any], described: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where nothing describes the op's result, the values of the FP32 run tell."""
    if not described:
        monkeypatch.setattr(twins, "_described", lambda called: None)
    ampaudit.twin(f"{LIB}::softmax", function)
    offset, words = HOSTILE[function]
    place = rf"test_twins\.py:{line_of(function, offset)}: the twin of {LIB}::softmax "
    with pytest.raises(SourceError, match=place + words) as caught:
        scanned(lambda x: softmax(x, 3.0))
    assert caught.value.exit_code == 2
    assert str(caught.value).count("\n") == 1


def test_a_twin_is_compared_on_each_batch() -> None:
    """Otherwise it would depend on the machine that runs a batch whether a difference is seen."""

    def without_large(x: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.softmax(x.clamp(max=10) * scale, -1)

    ampaudit.twin(f"{LIB}::softmax", without_large)
    model = Wrap(lambda model, x: softmax(model.a(x), 3.0), a=identity()).eval()
    large = X.abs().cumsum(0) * 10
    scan(model, batches=[(X,)], policy="half")
    with pytest.raises(SourceError, match="computes something else"):
        scan(model, batches=[(X,), (large,)], policy="half")


def test_a_twin_that_calls_its_own_op_is_one_line() -> None:
    ampaudit.twin(f"{LIB}::softmax", calls_itself)
    with pytest.raises(SourceError, match=f"the twin of {LIB}::softmax calls {LIB}::softmax itself"):
        scanned(lambda x: softmax(x, 3.0))


def test_rounding_of_another_order_is_no_difference() -> None:
    def other_order(x: torch.Tensor, scale: float) -> torch.Tensor:
        return torch.softmax(x * scale, -1)

    ampaudit.twin(f"{LIB}::softmax", other_order)
    assert not torch.equal(other_order(X, 3.0), softmax(X, 3.0))
    assert scanned(lambda x: softmax(x, 3.0)).gaps == ()


@pytest.mark.parametrize(
    ("op", "function", "words"),
    [
        (f"{LIB}::softmaxx", plain_softmax, f"no op {LIB}::softmaxx.*did you mean '{LIB}::softmax'"),
        ("nowhere::op", plain_softmax, "no op nowhere::op.*import the library"),
        (f"{LIB}::softmax.out", plain_softmax, "no op .*softmax.out"),
        ("softmax", plain_softmax, "'softmax' does not name an op"),
        (3, plain_softmax, "'?3'? does not name an op"),
        (f"{LIB}::softmax", 3, "is of type int"),
        (f"{LIB}::softmax", nn.Linear, "is of type type"),
        ("aten::softmax.int", plain_softmax, "needs no twin"),
    ],
)
def test_what_cannot_be_a_twin_is_refused_when_given(op: Any, function: Any, words: str) -> None:
    with pytest.raises(UsageError, match=f"(?s){words}"):
        ampaudit.twin(op, function)


def test_an_op_has_one_twin() -> None:
    ampaudit.twin(f"{LIB}::softmax", plain_softmax)
    ampaudit.twin(f"{LIB}::softmax", plain_softmax)  # its file may run again
    with pytest.raises(UsageError, match="has a twin already: plain_softmax"):
        ampaudit.twin(f"{LIB}::softmax")(wrong_value)


def test_a_file_registers_twins(tmp_path: Path) -> None:
    path = tmp_path / "twins_of_mine.py"
    path.write_text(PACKAGED)
    assert scanned(lambda x: softmax(x, 3.0), twins=path).gaps == ()
    path.write_text("import torch")
    with pytest.raises(SourceError, match=r"twins_of_mine\.py registers no twin"):
        scanned(lambda x: softmax(x, 3.0), twins=path)
    with pytest.raises(SourceError, match="no such file"):
        scanned(lambda x: softmax(x, 3.0), twins=tmp_path / "missing.py")


def test_what_is_converted_keeps_the_op(tmp_path: Path) -> None:
    ampaudit.twin(f"{LIB}::softmax", plain_softmax)
    softmax.register_fake(lambda x, scale: torch.empty_like(x))
    model = Wrap(lambda model, x: softmax(model.a(x), 3.0), a=identity()).eval()
    report, _ = ampaudit.convert(model, X, tmp_path / "out", policy="half", program=False)
    assert f"(top)/{LIB}::softmax" in [site.site for site in report.sites]
    assert [gap.kind for gap in report.gaps] == [GapKind.OPAQUE]


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """Install a distribution with an entry point."""

    def install(text: str) -> None:
        info = tmp_path / "ampaudit_twin_test-1.0.dist-info"
        info.mkdir()
        (info / "METADATA").write_text("Metadata-Version: 2.1\nName: ampaudit-twin-test\nVersion: 1.0\n")
        (info / "entry_points.txt").write_text("[ampaudit.twins]\nmine = ampaudit_twin_test\n")
        (tmp_path / "ampaudit_twin_test.py").write_text(text)
        monkeypatch.syspath_prepend(tmp_path)

    monkeypatch.setattr(twin_files, "_LOADED", set())
    yield install
    sys.modules.pop("ampaudit_twin_test", None)


def test_installed_packages_declare_twins(package: Callable[[str], None]) -> None:
    package(PACKAGED)
    report = scanned(lambda x: softmax(x, 3.0))
    assert report.gaps == ()
    assert f"(top)/{LIB}::softmax/softmax" in [site.site for site in report.sites]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("import nowhere", "ModuleNotFoundError: No module named 'nowhere'"),
        (f"import ampaudit\nampaudit.twin('{LIB}::missing', print)", f"there is no op {LIB}::missing"),
    ],
)
def test_a_package_that_fails_is_named(package: Callable[[str], None], text: str, words: str) -> None:
    package(text)
    with pytest.raises(
        SourceError, match=f"ampaudit-twin-test declares twins that cannot be loaded .*{words}"
    ):
        scanned(lambda x: x)
