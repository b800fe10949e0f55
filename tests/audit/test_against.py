"""``--against``: the op that a conversion or an export gets wrong is named; good ones are quiet."""

from __future__ import annotations

import warnings
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch

from ampaudit.audit.scan import scan
from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.report.model import Report
from tests.support.mutations import Mutant, mutants
from tests.support.onnx_models.case import Arrays
from tests.support.onnx_models.pairs import BROKEN, pair

MODEL = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width=16, heads=2):
        super().__init__()
        self.q, self.k, self.v, self.o = (nn.Linear(width, width) for _ in range(4))
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.first, self.second, self.heads = nn.LayerNorm(width), nn.LayerNorm(width), heads

    def split(self, x):
        return x.view(*x.shape[:2], self.heads, -1).transpose(1, 2)

    def forward(self, x, mask):
        q, k, v = self.split(self.q(x)), self.split(self.k(x)), self.split(self.v(x))
        weights = torch.softmax(q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5 + mask, -1)
        x = self.first(x + self.o((weights @ v).transpose(1, 2).reshape(x.shape)))
        return self.second(x + self.down(nn.functional.gelu(self.up(x))))


class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(50, 16), nn.Linear(16, 5)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, ids):
        x = self.embed(ids)
        mask = torch.where(ids[:, None, None, :] > 0, 0.0, -1e9)
        for block in self.blocks:
            x = block(x, mask)
        length = x.norm(dim=-1, keepdim=True)
        unit = x / (length + 1e-8)
        return torch.log_softmax(self.head(x), -1), unit


def get_model():
    torch.manual_seed(0)
    model = Model()
    for name, parameter in model.named_parameters():
        if name.endswith("bias"):
            torch.nn.init.normal_(parameter, std=0.3)
    return model.eval()


def example_inputs():
    torch.manual_seed(1)
    ids = torch.randint(1, 50, (2, 6))
    ids[0, 4:] = 0
    return (ids,)
"""
TRUSTED = SourceConfig(trust=True)
EPS_LINE = 1 + next(i for i, line in enumerate(MODEL.splitlines()) if "1e-8" in line)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with model.py, and its exports by both exporters."""
    place = tmp_path_factory.mktemp("exported")
    (place / "model.py").write_text(MODEL, encoding="utf-8")
    scope: dict[str, object] = {}
    exec(compile(MODEL, str(place / "model.py"), "exec"), scope)
    model, inputs = scope["get_model"](), scope["example_inputs"]()  # type: ignore[operator]
    export(model, inputs, place / "dynamo.onnx", dynamo=True)
    export(model, inputs, place / "script.onnx", dynamo=False)
    return place


def export(model: torch.nn.Module, inputs: tuple[torch.Tensor, ...], path: Path, *, dynamo: bool) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporters, about themselves
        names = None if dynamo else ["ids"]
        torch.onnx.export(model.eval(), inputs, path, dynamo=dynamo, input_names=names, verbose=False)


def ids() -> dict[str, torch.Tensor]:
    torch.manual_seed(1)
    found = torch.randint(1, 50, (2, 6))
    found[0, 4:] = 0
    return {"ids": found}


def compared(place: Path, reference: onnx.ModelProto, audited: onnx.ModelProto, inputs: Arrays) -> Report:
    onnx.save(reference, place / "a.onnx"), onnx.save(audited, place / "b.onnx")
    given = {name: torch.from_numpy(array) for name, array in inputs.items()}
    return scan(str(place / "a.onnx"), given, against=str(place / "b.onnx"))


def named(report: Report) -> list[str]:
    return [f.layer for f in report.findings if f.code == "AMP611"]


@pytest.mark.parametrize("name", BROKEN)
def test_the_wrong_node_of_a_broken_conversion_is_named(name: str, tmp_path: Path) -> None:
    case = pair(name)
    report = compared(tmp_path, case.original, case.bad, case.inputs)
    assert report.exit_code == 1
    assert case.node in [f.layer for f in report.findings if f.severity == "error"]
    others = {f.layer for f in report.findings if f.severity == "error"} - {case.node}
    assert not others or name == "dropped_eps"  # there, the logarithm of zero overflows as well
    assert not named(report) or named(report) == [case.node]


@pytest.mark.parametrize("name", BROKEN)
def test_a_good_conversion_is_quiet(name: str, tmp_path: Path) -> None:
    case = pair(name)
    report = compared(tmp_path, case.original, case.good, case.inputs)
    assert report.exit_code == 0
    assert not report.findings
    assert report.against is not None
    assert not report.against.only_reference
    assert not report.against.only_here
    assert report.low_precision_sites


def test_an_export_without_its_eps_is_found_with_the_line_of_the_model(exported: Path) -> None:
    report = scan(str(exported / "model.py"), against=str(exported / "dynamo.onnx"), source=TRUSTED)
    (finding,) = report.findings
    assert finding.code == "AMP612"
    assert finding.severity == "warning"
    assert f"model.py:{EPS_LINE}" in finding.cause
    assert "add(1e-08)" in finding.cause
    assert report.against is not None
    assert [d.counterpart for d in report.against.differences] == ["(top)/add"]


def test_a_dropped_eps_that_matters_is_an_error(tmp_path: Path) -> None:
    class Normalized(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x / (x.norm(dim=-1, keepdim=True) + 1e-8)

    x = torch.randn(3, 4)
    x[1] = 0
    export(Normalized(), (x,), tmp_path / "m.onnx", dynamo=True)
    report = scan(Normalized(), x, against=str(tmp_path / "m.onnx"))
    found = [(f.code, f.severity) for f in report.findings if f.code.startswith("AMP61")]
    assert found == [("AMP611", "error")]
    assert report.exit_code == 1


def test_a_good_export_is_matched_and_quiet(exported: Path) -> None:
    for reference, least in (("model.py", 40), ("dynamo.onnx", 50)):
        location = str(exported / reference)
        report = scan(
            location,
            None if reference == "model.py" else ids(),
            against=str(exported / "script.onnx"),
            source=TRUSTED,
        )
        assert not [f for f in report.findings if f.severity != "note"], report.findings
        assert report.against is not None
        assert len(report.against.matched) >= least
        assert not report.against.differences
        assert len(report.against.only_reference) <= 1


def test_the_converter_of_onnxruntime_is_quiet(exported: Path, tmp_path: Path) -> None:
    from onnxruntime.transformers.float16 import convert_float_to_float16

    original = onnx.load(exported / "script.onnx")
    converted = convert_float_to_float16(onnx.load(exported / "script.onnx"), keep_io_types=True)
    report = compared(tmp_path, original, converted, {"ids": ids()["ids"].numpy()})
    assert not named(report), report.findings
    assert report.low_precision_sites


def changes_outputs(reference: Path, mutant: Mutant, place: Path) -> bool:
    """Whether ONNX Runtime sees the change in an output."""
    onnx.save(mutant.model, place / "mutant.onnx")
    runs = []
    for path in (reference, place / "mutant.onnx"):
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        runs.append(session.run(None, {"ids": ids()["ids"].numpy()}))
    return not all(np.allclose(a, b, rtol=3e-3, atol=1e-4) for a, b in zip(*runs, strict=True))


@pytest.mark.parametrize("reference", ["script.onnx", "model.py"])
@pytest.mark.parametrize("seeds", [range(6, 14), range(14, 60)], ids=str)
def test_a_random_change_is_named(reference: str, seeds: range, exported: Path, tmp_path: Path) -> None:
    base = exported / "script.onnx"
    made = mutants(onnx.load(base), seeds)
    seen = [mutant for mutant in made if changes_outputs(base, mutant, tmp_path)]
    assert len(seen) >= len(seeds) / 3
    wrong = []
    for mutant in seen:
        onnx.save(mutant.model, tmp_path / "b.onnx")
        given = ids() if reference == "script.onnx" else None
        report = scan(str(exported / reference), given, against=str(tmp_path / "b.onnx"), source=TRUSTED)
        if named(report) != [mutant.node]:
            wrong.append((mutant.node, mutant.what, named(report)))
    assert not wrong


@pytest.mark.parametrize("option", [{"static": True}, {"ranges": True}, {"backward": True}, {"steps": 2}])
def test_options_that_cannot_be_combined_are_refused(option: dict[str, bool]) -> None:
    with pytest.raises(UsageError, match="cannot be combined with"):
        scan(torch.nn.Linear(2, 2), torch.ones(1, 2), against=torch.nn.Linear(2, 2), **option)  # type: ignore[call-overload]


def test_inputs_and_outputs_that_do_not_fit_are_refused() -> None:
    class Two(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            return x, x + 1

    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return x + y

    with pytest.raises(InputError, match="2 outputs, and the reference 1"):
        scan(torch.nn.Linear(2, 2), torch.ones(1, 2), against=Two())


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_a_module_in_16_bits_is_compared_with_itself_in_fp32(dtype: torch.dtype, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval()
    low = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4)).eval()
    low.load_state_dict(model.state_dict())
    report = scan(model, torch.randn(4, 8), against=low.to(dtype))
    assert report.run.dtype == str(dtype).removeprefix("torch.")
    assert report.exit_code == 0
    assert not report.findings
    assert report.against is not None
    assert [(pair.site, pair.counterpart) for pair in report.against.matched] == [
        (site, site) for site in ("0/linear", "1/gelu", "2/linear")
    ]
    for suffix in ("json", "html", "md"):
        report.save(tmp_path / f"report.{suffix}")
        assert "against" in (tmp_path / f"report.{suffix}").read_text(encoding="utf-8").lower()


def test_a_weight_that_is_clipped_within_the_format_is_named() -> None:
    class Scaled(torch.nn.Module):
        def __init__(self, largest: float) -> None:
            super().__init__()
            self.scale = torch.nn.Parameter(torch.tensor([1.0, 2.0, largest]))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.scale

    report = scan(Scaled(20000.0), torch.full((2, 3), 0.5), against=Scaled(10000.0))
    (finding,) = report.findings
    assert (finding.code, finding.severity) == ("AMP611", "error")
    assert "scale differs in 1 of 3 elements: [2] is 10,000, and 20,000 in the reference" in finding.cause
