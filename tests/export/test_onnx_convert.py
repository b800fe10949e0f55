"""ONNX files that are converted in place: judged by ONNX Runtime with every 16-bit value rounded."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx import TensorProto

from ampaudit.core.errors import RunFailed, UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.export.convert import convert
from ampaudit.export.onnx.write import write_model
from ampaudit.export.verify import verify
from ampaudit.source.open import open_source
from tests.support.onnx_conversion import CLOSE, FLOATS, check_structure, close, converted, types
from tests.support.onnx_graphs import mlp
from tests.support.onnx_models import GENERATED, build
from tests.support.onnx_models.odd import ODD, REFUSED_BY
from tests.support.onnx_models.planted import planted
from tests.support.onnx_strict import run_fp32, run_strict

SMALL = [name for name in GENERATED if name != "big"]
# strings have no tensor; its output is what rounding leaves of a sum that is 0
NOT_CONVERTED = {"strings_and_integers", "empty_outputs"}


@pytest.mark.parametrize("name", SMALL)
def test_a_generated_model_is_right_when_every_16_bit_value_is_rounded(name: str, tmp_path: Path) -> None:
    path, inputs = build(name, tmp_path)
    made = converted(path, inputs, tmp_path / "out")
    after = tmp_path / "out" / "model.onnx"
    check_structure(path, after)
    close(run_fp32(path, inputs), run_strict(after, inputs))
    for record, exact in zip(made.outputs, run_fp32(path, inputs).values(), strict=True):
        if (
            exact.dtype.kind == "f" and record.max_error is not None
        ):  # what we say that it computes is what the oracle finds
            error = np.abs(run_strict(after, inputs)[record.name].astype(np.float64) - exact).max()
            scale = CLOSE * float(np.abs(exact).max()) / 4
            assert float(error) == pytest.approx(record.max_error, rel=0.5, abs=scale)
    assert made.bytes_after <= 0.7 * made.bytes_before


@pytest.mark.parametrize("name", [name for name in ODD if name not in NOT_CONVERTED])
def test_an_odd_graph_is_converted(name: str, tmp_path: Path) -> None:
    model, inputs = ODD[name]()
    path = tmp_path / "model.onnx"
    onnx.save(model, path)
    converted(path, inputs, tmp_path / "out")
    after = tmp_path / "out" / "model.onnx"
    if name in REFUSED_BY:
        onnx.checker.check_model(str(after), full_check=True)
        return
    check_structure(path, after)
    close(run_fp32(path, inputs), run_strict(after, inputs))


def test_bert_and_gpt2_need_no_float32(tmp_path: Path) -> None:
    for name in ("bert", "gpt2"):
        path, inputs = build(name, tmp_path / name)
        made = converted(path, inputs, tmp_path / f"{name}-out")
        assert made.onnx_casts is not None
        assert made.onnx_casts <= 3
        assert "float" not in made.stored


def test_bfloat16(tmp_path: Path) -> None:
    path, inputs = build("bert", tmp_path)
    converted(path, inputs, tmp_path / "out", dtype="bfloat16")
    found = types(onnx.load(tmp_path / "out" / "model.onnx"))
    assert TensorProto.BFLOAT16 in found.values()
    assert TensorProto.FLOAT16 not in found.values()
    expected, ours = run_fp32(path, inputs), run_strict(tmp_path / "out" / "model.onnx", inputs)
    for name, exact in expected.items():
        assert np.abs(ours[name] - exact).max() < 0.1 * np.abs(exact).max()


def test_the_border_takes_16_bits(tmp_path: Path) -> None:
    path, inputs = build("resnet", tmp_path)
    made = converted(path, inputs, tmp_path / "out", io="float16")
    model = onnx.load(tmp_path / "out" / "model.onnx")
    kinds = {v.type.tensor_type.elem_type for v in (*model.graph.input, *model.graph.output)}
    assert kinds == {TensorProto.FLOAT16}
    assert made.onnx_casts == 0
    with pytest.raises(UsageError, match="--io bfloat16 is not the format"):
        converted(path, inputs, tmp_path / "other", io="bfloat16")


def test_a_shared_weight_stays_shared(tmp_path: Path) -> None:
    path, inputs = build("gpt2", tmp_path)
    before = {i.name for i in onnx.load(path).graph.initializer}
    converted(path, inputs, tmp_path / "out")
    after = onnx.load(tmp_path / "out" / "model.onnx").graph.initializer
    assert {i.name for i in after} <= before
    assert {i.data_type for i in after} & FLOATS == {TensorProto.FLOAT16}


@pytest.mark.parametrize("name", ["matmul", "norm", "reduce_sum"])
def test_what_overflows_stays_in_float32(name: str, tmp_path: Path) -> None:
    case = planted(name)
    path = tmp_path / "model.onnx"
    onnx.save(case.model, path)
    converted(path, case.inputs, tmp_path / "out")
    expected = run_fp32(path, case.inputs)
    found = run_strict(tmp_path / "out" / "model.onnx", case.inputs)
    assert all(np.isfinite(value).all() for value in found.values())
    close(expected, found)
    half = run_strict(path, case.inputs, assume=TensorProto.FLOAT16)
    assert not all(np.allclose(half[name], expected[name], rtol=0.1) for name in expected)


def test_a_policy_that_breaks_writes_nothing(tmp_path: Path) -> None:
    case = planted("matmul")
    path = tmp_path / "model.onnx"
    onnx.save(case.model, path)
    np.savez(tmp_path / "inputs.npz", **case.inputs)
    source = open_source(str(path), SourceConfig(inputs=tmp_path / "inputs.npz"))
    report, made = convert(source, None, tmp_path / "out", policy="half")
    assert made is None
    assert report.exit_code == 1
    assert not (tmp_path / "out").exists()


def test_the_same_file_twice(tmp_path: Path) -> None:
    path, inputs = build("t5", tmp_path)
    for name in ("one", "two"):
        converted(path, inputs, tmp_path / name)
    one, two = ((tmp_path / name / "model.onnx").read_bytes() for name in ("one", "two"))
    assert one == two


def test_a_converted_directory_is_scanned_as_it_is(tmp_path: Path) -> None:
    import ampaudit

    path, inputs = build("bert", tmp_path)
    converted(path, inputs, tmp_path / "out")
    report = ampaudit.scan(str(tmp_path / "out"), source=SourceConfig(inputs=tmp_path / "inputs.npz"))
    assert report.run.policy == "as-is"
    assert report.exit_code == 0
    assert ampaudit.verify(tmp_path / "out").exit_code == 0


def test_a_file_that_a_runtime_refuses_is_not_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def write(model: ir.Model, path: Path) -> None:
        nodes = list(model.graph)
        nodes[0].name = nodes[1].name
        write_model(model, path)

    monkeypatch.setattr("ampaudit.export.onnx.convert.write_model", write)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the audit is kept
    path, inputs = build("bert", tmp_path)
    with pytest.raises(RunFailed, match=r"model\.onnx is rejected by ONNX Runtime: .*two nodes"):
        converted(path, inputs, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_verify_says_how_to_run_a_graph(tmp_path: Path) -> None:
    path = tmp_path / "mlp.onnx"
    path.write_bytes(mlp().SerializeToString())
    convert(open_source(str(path), SourceConfig()), output=tmp_path / "out")
    found = verify(tmp_path / "out")
    assert found.exit_code == 0
    (line,) = found.outputs
    assert f"ampaudit scan {path} --against DIR/model.onnx" in line


def test_an_output_that_is_not_accurate_enough_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampaudit.export.onnx.outputs.compare_output", lambda *_: (9.0, 5.0))
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # the audit is kept
    path, inputs = build("resnet", tmp_path)
    with pytest.raises(RunFailed, match=r"the written file computes \w+ with 5 dB against FP32"):
        converted(path, inputs, tmp_path / "out")
    assert not (tmp_path / "out").exists()
