"""``ampaudit verify``: whatever is done to a converted directory is found, and named."""

from __future__ import annotations

import copy
import json
import math
import shutil
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from ampaudit.checkpoint import MANIFEST
from ampaudit.core.errors import WeightsError
from ampaudit.export.manifest import digest_of, read_manifest, write_manifest
from ampaudit.export.verify import verify
from ampaudit.source.interface import Batch, ModelSource
from tests.support.converted import converted, tied

WEIGHTS, MASTERS, PROGRAM = "model.safetensors", "master.safetensors", "model.pt2"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return converted(tied(), tmp_path_factory.mktemp("original") / "out", policy="half")


@pytest.fixture
def out(original: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(original, tmp_path / "out"))


def flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 4
    path.write_bytes(data)


def edit(path: Path, change: Callable[[dict[str, torch.Tensor]], dict[str, torch.Tensor]]) -> None:
    tensors = change({name: t.clone() for name, t in safetensors.torch.load_file(path).items()})
    with safe_open(path, "pt") as opened:
        metadata = opened.metadata()
    safetensors.torch.save_file(tensors, path, metadata)


def swapped(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    a, b = "norm.weight", "inner.bias"
    return {**tensors, a: tensors[b], b: tensors[a]}


def hide(directory: Path, *names: str) -> None:
    """Make the digests right again, as somebody would who does not want to be found."""
    manifest = read_manifest(directory)
    files = {**manifest.files, **{name: digest_of(directory / name) for name in names}}
    write_manifest(directory, replace(manifest, files=files))


def test_an_untouched_directory_passes(out: Path) -> None:
    found = verify(out)
    assert found.exit_code == 0
    assert found.problems == ()
    assert [line.split(": ")[1] for line in found.outputs] == ["the same bits"] * 2
    assert found.tensors == 9


def test_layers_may_have_names_that_are_no_identifiers(tmp_path: Path) -> None:
    names = ["a-b", "a b", "x:y*[z]", "ü/1", "é", "~", "it's", "0"]
    model = nn.Sequential(OrderedDict((name, nn.Linear(4, 4)) for name in names)).eval()
    source = ModelSource("named.py", "python", model, (Batch((torch.randn(2, 4),)),))
    found = verify(converted(source, tmp_path / "out", policy="half"))
    assert found.problems == ()
    assert found.outputs


class Writing(nn.Module):
    """Writes to its own input, directly, through a view, and to one that it is given twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, again: torch.Tensor) -> torch.Tensor:
        x.mul_(2.0)
        again[:, 0].add_(1.0)
        made: torch.Tensor = self.inner(x + again)
        return made


@pytest.mark.parametrize("twice", [False, True])
def test_a_model_that_writes_to_its_inputs_passes(tmp_path: Path, twice: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(2, 4)
    given = (x, x if twice else torch.randn(2, 4))
    before = [tensor.clone() for tensor in given]
    source = ModelSource("writing.py", "python", Writing().eval(), (Batch(given),))
    report = read_manifest(converted(source, tmp_path / "out", policy="half"))
    assert all(torch.equal(*pair) for pair in zip(given, before, strict=True))
    accuracy = report.outputs[0].sqnr_db
    assert accuracy is not None
    assert accuracy > 50
    assert verify(tmp_path / "out").exit_code == 0


def flipped_weight(out: Path) -> None:
    with (out / WEIGHTS).open("rb") as stream:
        start = 8 + int.from_bytes(stream.read(8), "little")
    entry = json.loads((out / WEIGHTS).read_bytes()[8:start])["inner.weight"]
    flip(out / WEIGHTS, start + entry["data_offsets"][0])


CORRUPTIONS: dict[str, tuple[Callable[[Path], object], list[tuple[str, str]]]] = {
    "a flipped bit": (flipped_weight, [("changed", WEIGHTS), ("tensor", f"{WEIGHTS}: inner.weight")]),
    "a missing file": (lambda out: (out / WEIGHTS).unlink(), [("missing", WEIGHTS)]),
    "a truncated file": (
        lambda out: (out / WEIGHTS).write_bytes((out / WEIGHTS).read_bytes()[:-100]),
        [("truncated", WEIGHTS)],
    ),
    "two weights swapped": (
        lambda out: edit(out / WEIGHTS, swapped),
        [("tensor", f"{WEIGHTS}: norm.weight"), ("tensor", f"{WEIGHTS}: inner.bias")],
    ),
    "a weight renamed": (
        lambda out: edit(
            out / WEIGHTS, lambda t: {("x" + n if n == "count" else n): v for n, v in t.items()}
        ),
        [("tensor", f"{WEIGHTS}: count"), ("tensor", f"{WEIGHTS}: xcount")],
    ),
    "a weight of another dtype": (
        lambda out: edit(out / WEIGHTS, lambda t: t | {"inner.bias": t["inner.bias"].float()}),
        [("tensor", f"{WEIGHTS}: inner.bias")],
    ),
    "a broken header": (lambda out: flip(out / WEIGHTS, 6), [("changed", WEIGHTS)]),
    "a flipped bit in a master": (
        lambda out: flip(out / MASTERS, -1),
        [("changed", MASTERS), ("tensor", f"{MASTERS}: ")],
    ),
    "a flipped bit in the program": (lambda out: flip(out / PROGRAM, 5000), [("changed", PROGRAM)]),
    "an edited report": (
        lambda out: (out / "report.json").write_text((out / "report.json").read_text() + " "),
        [("changed", "report.json")],
    ),
    "no plan": (lambda out: (out / "plan.yaml").unlink(), [("missing", "plan.yaml")]),
    "an extra file": (lambda out: (out / "virus.py").write_text("boom"), [("extra", "virus.py")]),
}


@pytest.mark.parametrize("case", CORRUPTIONS)
def test_corruptions_are_named(out: Path, case: str) -> None:
    corrupt, expected = CORRUPTIONS[case]
    corrupt(out)
    found = verify(out, run=False)
    assert found.exit_code == 1
    seen = [(p.kind, p.where) for p in found.problems]
    for kind, where in expected:
        assert any(k == kind and w.startswith(where) for k, w in seen), seen
    files = {where.split(":")[0] for _, where in expected}
    assert {w.split(":")[0] for k, w in seen if k != "rounding"} == files


def test_a_weight_swapped_with_its_digests_is_not_its_master(out: Path) -> None:
    edit(out / WEIGHTS, swapped)
    hide(out, WEIGHTS)
    found = verify(out)
    seen = {(p.kind, p.where) for p in found.problems}
    assert ("rounding", f"{WEIGHTS}: norm.weight") in seen
    assert ("rounding", f"{WEIGHTS}: inner.bias") in seen
    assert ("program", f"{PROGRAM}: norm.weight") in seen


def test_another_program_with_its_digest_computes_something_else(out: Path, tmp_path: Path) -> None:
    torch.manual_seed(1)
    source = tied()
    with torch.no_grad():
        source.model.inner.weight.mul_(1.5)
    other = converted(source, tmp_path / "other", policy="half")
    shutil.copy(other / PROGRAM, out / PROGRAM)
    hide(out, PROGRAM)
    seen = [(p.kind, p.where) for p in verify(out).problems]
    assert ("program", f"{PROGRAM}: inner.weight") in seen
    assert ("output", "output.hidden") in seen


def test_a_program_that_cannot_be_loaded_is_a_problem(out: Path) -> None:
    (out / PROGRAM).write_bytes(b"PK nonsense")
    hide(out, PROGRAM)
    (problem,) = verify(out).problems
    assert problem.kind == "program"


def test_a_program_with_operators_of_a_package_is_not_run(tmp_path: Path) -> None:
    @torch.library.custom_op("ampaudit_verify::shifted", mutates_args=())
    def shifted(x: torch.Tensor) -> torch.Tensor:
        return x + 1

    shifted.register_fake(torch.empty_like)

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return shifted(self.inner(x))  # type: ignore[no-any-return]

    source = ModelSource("net.py", "python", Net().eval(), (Batch((torch.randn(2, 4),)),))
    out = converted(source, tmp_path / "out", policy="half")
    verification = verify(out)
    assert not verification.problems
    (line,) = verification.outputs
    assert line.startswith("nothing was run: operator 'torch.ops.ampaudit_verify.shifted.default'")
    flip(out / PROGRAM, -30)
    assert verify(out).problems


def test_other_recorded_inputs_give_other_outputs(out: Path) -> None:
    edit(out / "reference.safetensors", lambda t: t | {"input[0]": t["input[0]"].flip(0)})
    hide(out, "reference.safetensors")
    kinds = {p.kind for p in verify(out).problems}
    assert kinds == {"output"}


def test_small_differences_of_other_kernels_pass(out: Path) -> None:
    """Recorded outputs that another machine would have made: the last bits differ."""
    edit(out / "reference.safetensors", lambda t: t | {"output[0]": t["output[0]"] * 1.001})
    manifest = read_manifest(out)
    outputs = (replace(manifest.outputs[0], sha256="0" * 64), *manifest.outputs[1:])
    write_manifest(out, replace(manifest, outputs=outputs))
    hide(out, "reference.safetensors")
    found = verify(out)
    assert found.exit_code == 0
    assert "another machine" in found.outputs[0]
    assert verify(out, tolerance_db=100.0).problems[0].kind == "output"


class Spectra(nn.Module):
    """Returns complex numbers, and views that torch conjugates or negates when they are read."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        spectrum = torch.fft.rfft(self.inner(x).float())
        return spectrum, spectrum.conj(), spectrum.conj().imag


def test_complex_outputs_are_compared_as_numbers(tmp_path: Path) -> None:
    model, x = Spectra().eval(), torch.randn(2, 16)
    out = converted(
        ModelSource("spectra.py", "python", model, (Batch((x,)),)), tmp_path / "out", policy="half"
    )
    manifest = read_manifest(out)
    stored = safetensors.torch.load_file(out / "reference.safetensors")
    with torch.no_grad():
        exact, lower = model(x), copy.deepcopy(model).half()(x.half())
    for index, (record, ours, theirs) in enumerate(zip(manifest.outputs, lower, exact, strict=True)):
        ratio = (theirs.abs().square().sum() / (ours - theirs).abs().square().sum()).item()
        assert record.sqnr_db == pytest.approx(10 * math.log10(ratio), abs=0.5)
        assert torch.allclose(stored[f"output[{index}]"], ours.resolve_conj().resolve_neg(), atol=1e-2)
    assert verify(out).problems == ()
    edit(out / "reference.safetensors", lambda t: t | {"output[0]": t["output[0]"] * 1.001})
    other = (replace(manifest.outputs[0], sha256="0" * 64), *manifest.outputs[1:])
    write_manifest(out, replace(manifest, outputs=other))
    hide(out, "reference.safetensors")
    assert verify(out).problems == ()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda text: text.replace('"policy": "half"', '"policy": "safe"'), "changed after it was written"),
        (lambda text: text[:-40], "delimiter|Expecting"),
        (lambda text: "[]", "manifest.json"),
        (lambda text: text.replace('"plan.yaml"', '"../../plan.yaml"'), "changed after it was written"),
        (lambda text: "{" + text, "manifest.json"),
    ],
)
def test_a_manifest_that_was_changed(out: Path, change: Callable[[str], str], message: str) -> None:
    (out / MANIFEST).write_text(change((out / MANIFEST).read_text()))
    with pytest.raises(WeightsError, match=message):
        verify(out)


def test_a_manifest_that_leads_elsewhere(out: Path) -> None:
    manifest = read_manifest(out)
    write_manifest(out, replace(manifest, files={**manifest.files, "../x": manifest.files["plan.yaml"]}))
    with pytest.raises(WeightsError, match="not in the directory"):
        verify(out)


def test_no_manifest(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"no readable manifest\.json"):
        verify(tmp_path)
