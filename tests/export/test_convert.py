"""Converted directories, judged by safetensors, Transformers, ONNX Runtime and torch itself."""

from __future__ import annotations

import json
import math
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import onnx
import onnxruntime
import pytest
import safetensors.torch
import torch
from safetensors import safe_open
from torch import nn

from ampaudit.audit.scan import scan
from ampaudit.checkpoint.layout import MANIFEST
from ampaudit.core.config import SourceConfig
from ampaudit.core.errors import OutputError, RunFailed, SourceError, UsageError, WeightsError
from ampaudit.export import onnx_file
from ampaudit.export.config import ConvertConfig
from ampaudit.export.convert import convert
from ampaudit.export.convert_weights import convert_weights
from ampaudit.export.manifest import read_manifest
from ampaudit.export.reference import compared
from ampaudit.export.restore import restore
from ampaudit.source import Batch, ModelSource
from ampaudit.source.open import open_source
from tests.support import zoo
from tests.support.converted import Tied, converted, tied

Cli = Callable[..., subprocess.CompletedProcess[str]]


def load(path: Path) -> dict[str, torch.Tensor]:
    return safetensors.torch.load_file(path)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(
        a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8)
    )


def test_the_directory_is_complete_and_described(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="torch-cuda")
    names = {p.name for p in out.iterdir()}
    assert names == {
        *("model.safetensors", "master.safetensors", "model.pt2", "plan.yaml", "report.json"),
        *("reference.safetensors", MANIFEST),
    }
    manifest = read_manifest(out)
    assert set(manifest.files) == names - {MANIFEST}
    for name, record in manifest.files.items():
        done = subprocess.run(["sha256sum", out / name], capture_output=True, text=True, check=True)
        assert done.stdout.split()[0] == record.sha256
        assert (out / name).stat().st_size == record.size
    assert json.loads((out / "report.json").read_text())["verdict"] == "pass"


@pytest.mark.parametrize("mode", ["inference", "train"])
@pytest.mark.parametrize("policy", ["torch-cuda", "half", "ampaudit"])
def test_working_weights_are_the_masters_rounded(tmp_path: Path, policy: str, mode: str) -> None:
    source = tied()
    out = converted(source, tmp_path / "out", policy=policy, mode=mode)
    working, masters = load(out / "model.safetensors"), load(out / "master.safetensors")
    state = source.model.state_dict()
    # autocast casts what linear takes, and not what an embedding or a norm takes
    floats = {n for n, t in state.items() if t.dtype is torch.float32} - {"head.weight"}
    lowered = floats if policy == "half" else {"inner.weight", "inner.bias"}
    assert {n for n, t in working.items() if t.dtype is torch.float16} == lowered
    for name, tensor in working.items():
        assert same_bits(tensor, state[name].to(tensor.dtype))
        if tensor.dtype != state[name].dtype:
            assert same_bits(masters[name], state[name])
    assert set(masters) == {n for n, t in working.items() if t.dtype is torch.float16}


def test_tied_weights_are_there_once_and_load_as_the_library_does(tmp_path: Path) -> None:
    source = tied()
    out = converted(source, tmp_path / "out", policy="half")
    with safe_open(out / "model.safetensors", "pt") as opened:
        assert "head.weight" not in set(opened.keys())
        assert opened.metadata()["head.weight"] == "table.weight"
    model = Tied().half()
    missing, unexpected = safetensors.torch.load_model(model, out / "model.safetensors")
    assert not missing
    assert not unexpected
    assert model.head.weight.data_ptr() == model.table.weight.data_ptr()
    assert same_bits(model.head.weight.detach(), source.model.head.weight.detach().half())


@pytest.mark.parametrize("policy", ["torch-cuda", "half", "keep-fp32-modules", "tensorflow", "onnx"])
@pytest.mark.parametrize("mode", ["inference", "train"])
def test_the_program_computes_what_the_plan_says(tmp_path: Path, policy: str, mode: str) -> None:
    """Oracles: the recorded FP32 outputs are the model's; half() gives the same bits; the rest is near."""
    source = tied()
    if mode == "train" and policy == "onnx":
        with pytest.raises(UsageError, match="clips weights"):
            converted(source, tmp_path / "out", policy=policy, mode=mode)
        return
    out = converted(source, tmp_path / "out", policy=policy, mode=mode)
    program = torch.export.load(out / "model.pt2")
    batch = source.batches[0]
    with torch.no_grad():
        found = program.module()(*batch.args)
        exact = source.model(*batch.args)
        native = None
        if policy == "half":
            half = Tied().eval()
            half.load_state_dict(source.model.state_dict())
            native = half.half()(*batch.args)
    recorded = load(out / "reference.safetensors")
    for index, name in enumerate(("logits", "hidden")):
        assert same_bits(recorded[f"fp32[{index}]"], exact[name])
        assert same_bits(recorded[f"output[{index}]"], found[name])
        assert (found[name].float() - exact[name]).abs().max() < 0.02
        if native is not None:
            assert same_bits(native[name], found[name])
    stored = {t.dtype for t in program.state_dict.values() if t.is_floating_point() and t.dtype.itemsize > 1}
    if mode == "train":
        assert stored == {torch.float32}
        assert any(p.requires_grad for p in program.parameters())
    else:
        assert torch.float16 in stored


def test_training_keeps_masters_that_learn(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="torch-cuda", mode="train")
    module = torch.export.load(out / "model.pt2").module()
    weight = dict(module.named_parameters())["inner.weight"]
    module(torch.arange(12).view(2, 6))["logits"].float().square().sum().backward()
    assert weight.dtype is torch.float32
    assert weight.grad is not None
    assert weight.grad.dtype is torch.float32
    assert weight.grad.abs().sum() > 0


def test_the_plan_file_converts_the_model_to_the_same_weights(tmp_path: Path) -> None:
    first = converted(tied(), tmp_path / "first", policy="ampaudit")
    again = converted(tied(), tmp_path / "again", policy=str(first / "plan.yaml"))
    assert read_manifest(again).files["model.safetensors"] == read_manifest(first).files["model.safetensors"]
    assert [o.sha256 for o in read_manifest(again).outputs] == [
        o.sha256 for o in read_manifest(first).outputs
    ]


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_masters_restore_every_bit(tmp_path: Path, policy: str) -> None:
    source = tied()
    path = tmp_path / "before.safetensors"
    safetensors.torch.save_model(source.model, str(path), {"author": "somebody"})
    out = converted(source, tmp_path / "out", policy=policy, weights=path)
    restore(out, tmp_path / "back", force=False)
    before, after = load(path), load(tmp_path / "back" / "model.safetensors")
    assert set(before) == set(after)
    assert all(same_bits(before[name], after[name]) for name in before)
    with safe_open(path, "pt") as a, safe_open(tmp_path / "back" / "model.safetensors", "pt") as b:
        assert a.metadata() == b.metadata()


def test_a_bfloat16_directory_is_restored_as_one(tmp_path: Path) -> None:
    made = zoo.bert().model.bfloat16()
    made.save_pretrained(tmp_path / "hf")
    source = open_source(str(tmp_path / "hf"), SourceConfig())
    out = converted(source, tmp_path / "out", policy="half", program=False)
    assert {t.dtype for t in load(out / "model.safetensors").values()} == {torch.float16}
    restore(out, tmp_path / "back", force=False)
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "bfloat16"
    name = "model.safetensors"
    assert (tmp_path / "back" / name).read_bytes() == (tmp_path / "hf" / name).read_bytes()


def test_without_masters_nothing_is_restored(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="half", masters=False)
    assert not (out / "master.safetensors").exists()
    with pytest.raises(UsageError, match="no masters"):
        restore(out, tmp_path / "back", force=False)
    assert not (tmp_path / "back").exists()


def test_a_damaged_master_is_not_restored(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="half")
    path = out / "master.safetensors"
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    with pytest.raises(WeightsError, match="was changed after the conversion"):
        restore(out, tmp_path / "back", force=False)
    assert not (tmp_path / "back").exists()


def test_a_model_that_breaks_is_not_converted(tmp_path: Path) -> None:
    class Large(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 300 * x

    source = ModelSource("large.py", "python", Large(), (Batch((torch.full((4,), 100.0),)),))
    report, made = convert(source, None, tmp_path / "out", policy="half")
    assert made is None
    assert report.exit_code == 1
    assert not (tmp_path / "out").exists()
    _, made = convert(source, None, tmp_path / "out", policy="half", fail_on="never")
    assert made is not None
    assert made.outputs[0].max_error is None


class Trained(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.drop(self.norm(self.inner(x)))


def test_a_model_in_training_mode_is_not_changed(tmp_path: Path) -> None:
    model = Trained().train()
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    source = ModelSource("m", "object", model, (Batch((torch.randn(16, 8),)),))
    expected = torch.get_rng_state()
    out = converted(source, tmp_path / "out", policy="torch-cuda", mode="train")
    assert torch.equal(torch.get_rng_state(), expected)
    assert not torch.equal(state, expected)
    assert all(same_bits(tensor, before[name]) for name, tensor in model.state_dict().items())
    stored = load(out / "model.safetensors")
    assert same_bits(stored["norm.running_mean"], before["norm.running_mean"])


class Caching(nn.Module):
    """Returns what its program does not: a cache, in front of what both return."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.config = nn.Linear(8, 8), type("Config", (), {"use_cache": True})()

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        extra = {"cache": x * 2} if self.config.use_cache else {}
        return {**extra, "hidden": self.inner(x)}


def test_outputs_are_matched_by_name(tmp_path: Path) -> None:
    source = ModelSource("m", "object", Caching(), (Batch((torch.randn(4, 8),)),))
    out = converted(source, tmp_path / "out", policy="half")
    (output,) = read_manifest(out).outputs
    assert output.name == "output.hidden"
    assert output.sqnr_db is not None
    assert output.sqnr_db > 50


def exported(tmp_path: Path, policy: str) -> tuple[Path, object]:
    _, made = convert(tied(), None, tmp_path / "out", policy=policy, onnx=True)
    assert made is not None
    return tmp_path / "out", made


@pytest.mark.parametrize("policy", ["torch-cuda", "half", "tensorflow"])
def test_onnx_keeps_casts_and_islands_and_means_the_same(tmp_path: Path, policy: str) -> None:
    """Oracles: onnx's checker and shapes; ONNX Runtime; the program's own casts, counted."""
    out, made = exported(tmp_path, policy)
    model = onnx.load(out / "model.onnx")
    onnx.checker.check_model(model, full_check=True)
    values = onnx.shape_inference.infer_shapes(model).graph
    kinds = {
        v.name: v.type.tensor_type.elem_type for v in [*values.value_info, *values.output, *values.input]
    }
    kinds |= {i.name: i.data_type for i in values.initializer}
    half, single = onnx.TensorProto.FLOAT16, onnx.TensorProto.FLOAT
    (norm,) = [n for n in model.graph.node if n.op_type == "LayerNormalization"]
    assert {kinds[name] for name in norm.input} == {half if policy == "half" else single}
    products = [n for n in model.graph.node if n.op_type in ("MatMul", "Gemm")]
    assert {kinds[n.output[0]] for n in products} == {half}
    program = torch.export.load(out / "model.pt2")
    casts = [n for n in program.graph.nodes if "aten.to" in str(n.target) or "_to_copy" in str(n.target)]
    given = [(n.meta["val"], n.all_input_nodes[0].meta["val"]) for n in casts]
    wanted = sum(a.is_floating_point() and a.dtype != b.dtype for a, b in given)
    adds = [n for n in program.graph.nodes if str(n.target) == "aten.add.Tensor"]
    promoted = sum(len({i.meta["val"].dtype for i in n.all_input_nodes}) == 2 for n in adds)
    assert made.onnx_casts == wanted + promoted  # ONNX has no promotion: it is a Cast there
    session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
    found = session.run(["logits"], {"ids": torch.arange(12).view(2, 6).numpy()})[0]
    recorded = load(out / "reference.safetensors")["output[0]"]
    two_ulps = 2 * 2.0**-10 * float(recorded.abs().max())
    assert abs(torch.from_numpy(found).float() - recorded.float()).max() <= two_ulps
    assert made.onnx_error <= two_ulps


def test_an_onnx_file_that_means_something_else_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = onnx_file._run
    monkeypatch.setattr(onnx_file, "_run", lambda *given: tuple(t * 1.2 for t in run(*given)))
    with pytest.raises(RunFailed, match="computes something else"):
        exported(tmp_path, "torch-cuda")
    assert not (tmp_path / "out").exists()


def test_given_weights_are_those_that_are_written(tmp_path: Path) -> None:
    """A Hugging Face directory with another checkpoint: the files of the directory are not mixed in."""
    made = zoo.bert().model
    made.save_pretrained(tmp_path / "hf")
    state = {name: tensor * 2 for name, tensor in made.state_dict().items()}
    safetensors.torch.save_file(state, tmp_path / "w.safetensors")
    source = open_source(str(tmp_path / "hf"), SourceConfig(weights=tmp_path / "w.safetensors"))
    options = {"policy": "half", "weights": tmp_path / "w.safetensors", "program": False}
    stored = load(converted(source, tmp_path / "out", **options) / "model.safetensors")
    name = "embeddings.word_embeddings.weight"
    assert same_bits(stored[name], state[name].half())


@pytest.mark.parametrize(
    ("architecture", "policy"),
    [("bert", "half"), ("t5", "half"), ("t5", "keep-fp32-modules"), ("mixtral", "half")],
)
def test_transformers_loads_what_was_stored(tmp_path: Path, architecture: str, policy: str) -> None:
    """Also where the file's names are not the model's, and where experts are put together on loading."""
    import transformers

    torch.manual_seed(0)
    made = zoo.ZOO[architecture]().model
    made.save_pretrained(tmp_path / "hf", max_shard_size="40KB")
    source = open_source(str(tmp_path / "hf"), SourceConfig())
    out = converted(source, tmp_path / "out", policy=policy, program=False)
    index = "model.safetensors.index.json"
    assert (
        json.loads((out / index).read_text())["weight_map"]
        == (json.loads((tmp_path / "hf" / index).read_text())["weight_map"])
    )
    loaded = getattr(transformers, type(made).__name__).from_pretrained(out, dtype="auto")
    before = made.state_dict()
    for name, tensor in loaded.state_dict().items():
        kept = architecture == "t5" and ".wo." in name  # the class keeps it in FP32
        assert tensor.dtype is (torch.float32 if kept else torch.float16), name
        exact = kept and policy == "keep-fp32-modules"
        assert torch.equal(tensor, before[name]) if exact else torch.equal(tensor.half(), before[name].half())
    assert json.loads((out / "config.json").read_text())["dtype"] == "float16"


@pytest.mark.gpu
def test_the_program_runs_on_a_gpu(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="torch-cuda")
    program = torch.export.passes.move_to_device_pass(torch.export.load(out / "model.pt2"), "cuda")
    recorded = load(out / "reference.safetensors")
    with torch.no_grad():
        found = program.module()(recorded["input[0]"].cuda())
    error, accuracy = compared(found["logits"].cpu(), recorded["output[0]"])
    assert error == 0 or (accuracy is not None and accuracy > 40)


# -- weights alone


def save(path: Path, tensors: dict[str, torch.Tensor]) -> Path:
    if path.suffix == ".safetensors":
        safetensors.torch.save_file(tensors, path, {"format": "pt", "step": "100"})
    else:
        torch.save(tensors, path)
    return path


WEIGHTS = {
    "a.weight": torch.linspace(-3, 3, 64).view(8, 8),
    "a.bias": torch.linspace(-3, 3, 8),
    "big.weight": torch.full((2, 2), 1e5),
    "ids": torch.arange(4),
    "eight": torch.ones(3, 3).to(torch.float8_e5m2),
    "double": torch.ones(2, 2, dtype=torch.float64),
    "already": torch.ones(2, 2, dtype=torch.float16),
    "brain": torch.full((2, 2), 1.5, dtype=torch.bfloat16),
    "empty": torch.empty(0, 4),
    "scalar": torch.tensor(3.25),
}


@pytest.mark.parametrize("suffix", [".safetensors", ".pt", ".bin"])
def test_a_checkpoint_alone(tmp_path: Path, suffix: str) -> None:
    path = save(tmp_path / f"w{suffix}", WEIGHTS)
    made = convert_weights(path, tmp_path / "out", ConvertConfig())
    after = load(tmp_path / "out" / "model.safetensors")
    assert made.exit_code == 0
    lowered = {"a.weight", "already", "brain", "empty"}
    for name, tensor in WEIGHTS.items():
        expected = tensor.half() if name in lowered else tensor
        assert same_bits(after[name], expected), name
    assert "does not fit" in read_manifest(tmp_path / "out").tensors["big.weight"].reason
    restore(tmp_path / "out", tmp_path / "back", force=False)
    back = load(tmp_path / "back" / "model.safetensors")
    assert all(same_bits(back[name], tensor) for name, tensor in WEIGHTS.items())
    if suffix == ".safetensors":
        with safe_open(tmp_path / "back" / "model.safetensors", "pt") as opened:
            assert opened.metadata() == {"format": "pt", "step": "100"}
        assert (tmp_path / "back" / "model.safetensors").read_bytes() == path.read_bytes()


def test_a_policy_of_16_bit_weights_casts_all_and_says_what_breaks(tmp_path: Path) -> None:
    weights = WEIGHTS | {"nan": torch.tensor([1.0, math.nan, math.inf])}
    made = convert_weights(save(tmp_path / "w.pt", weights), tmp_path / "out", ConvertConfig(policy="half"))
    after = load(tmp_path / "out" / "model.safetensors")
    assert made.overflow == {"big.weight": 4}
    assert made.broken == {"nan": 2}
    assert made.exit_code == 1
    assert after["big.weight"].isinf().all()
    assert same_bits(after["a.bias"], WEIGHTS["a.bias"].half())
    assert after["double"].dtype is torch.float16  # as ``.half()`` has it


@pytest.mark.parametrize("policy", ["as-is", "apex-o0"])
def test_a_policy_that_lowers_nothing_changes_nothing(tmp_path: Path, policy: str) -> None:
    path = save(tmp_path / "w.safetensors", WEIGHTS)
    convert_weights(path, tmp_path / "out", ConvertConfig(policy=policy))
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == path.read_bytes()
    assert not (tmp_path / "out" / "master.safetensors").exists()


def test_a_policy_that_asks_for_modules_needs_the_model(tmp_path: Path) -> None:
    path = save(tmp_path / "w.pt", WEIGHTS)
    with pytest.raises(UsageError, match="by the class of their module"):
        convert_weights(path, tmp_path / "out", ConvertConfig(policy="keep-fp32-modules"))
    for options in (ConvertConfig(mode="train"), ConvertConfig(onnx=True)):
        with pytest.raises(UsageError, match="no graph"):
            convert_weights(path, tmp_path / "out", options)


def test_shards_stay_shards(tmp_path: Path) -> None:
    first, second = {"a": torch.randn(9, 9), "b": torch.randn(3)}, {"c": torch.randn(4, 4)}
    names = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")
    for name, tensors in zip(names, (first, second), strict=True):
        safetensors.torch.save_file(tensors, tmp_path / name, {"format": "pt"})
    weight_map = {"a": names[0], "b": names[0], "c": names[1]}
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"metadata": {"total_size": 400}, "weight_map": weight_map}))
    convert_weights(index, tmp_path / "out", ConvertConfig())
    table = json.loads((tmp_path / "out" / index.name).read_text())
    assert table["weight_map"] == weight_map
    assert table["metadata"]["total_size"] == 81 * 2 + 3 * 4 + 16 * 2
    for name, tensors in zip(names, (first, second), strict=True):
        after = load(tmp_path / "out" / name)
        assert all(same_bits(after[n], t.half() if t.dim() == 2 else t) for n, t in tensors.items())
    masters = json.loads((tmp_path / "out" / "master.safetensors.index.json").read_text())
    assert masters["weight_map"]["c"] == "master-00002-of-00002.safetensors"
    restore(tmp_path / "out", tmp_path / "back", force=False)
    for name in names:
        assert (tmp_path / "back" / name).read_bytes() == (tmp_path / name).read_bytes()
    assert json.loads((tmp_path / "back" / index.name).read_text())["metadata"]["total_size"] == 400


# -- bad input


def test_existing_output(tmp_path: Path) -> None:
    path = save(tmp_path / "w.pt", WEIGHTS)
    convert_weights(path, tmp_path / "out", ConvertConfig())
    with pytest.raises(OutputError, match="exists"):
        convert_weights(path, tmp_path / "out", ConvertConfig())
    convert_weights(path, tmp_path / "out", ConvertConfig(policy="half", force=True))
    assert read_manifest(tmp_path / "out").policy == "half"


def test_a_link_as_output(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "real")
    with pytest.raises(OutputError, match="symbolic link"):
        convert_weights(save(tmp_path / "w.pt", WEIGHTS), tmp_path / "link", ConvertConfig(force=True))


def small_files_only() -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))


def test_a_disk_that_is_full_half_way(tmp_path: Path) -> None:
    """The limit on the size of a file makes a real write fail in the middle."""
    path = save(tmp_path / "w.safetensors", {"w": torch.randn(1000, 1000)})
    (tmp_path / "room").mkdir()
    command = [sys.executable, "-m", "ampaudit", "convert", str(path), "-o", str(tmp_path / "room" / "out")]
    done = subprocess.run(
        command, capture_output=True, text=True, preexec_fn=small_files_only, check=False, timeout=300
    )
    assert done.returncode == 2
    assert done.stderr.startswith("ampaudit: cannot write")
    assert "nothing was changed" in done.stderr
    assert "Traceback" not in done.stderr
    assert os.listdir(tmp_path / "room") == []


def test_weights_that_do_not_match_the_model(tmp_path: Path) -> None:
    (tmp_path / "m.py").write_text(
        "import torch\nfrom torch import nn\n"
        "def get_model(): return nn.Linear(4, 4)\ndef example_inputs(): return torch.randn(2, 4)\n"
    )
    save(tmp_path / "w.safetensors", {"weight": torch.ones(5, 4), "bias": torch.ones(4)})
    with pytest.raises(WeightsError, match="does not match the model"):
        open_source(str(tmp_path / "m.py"), SourceConfig(weights=tmp_path / "w.safetensors"))


def test_a_converted_directory_is_not_converted_again(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="half")
    source = open_source(str(out), SourceConfig())
    assert source.kind == "converted"
    with pytest.raises(SourceError, match="converted already"):
        convert(source, None, tmp_path / "again")


def test_a_converted_directory_can_be_scanned_as_it_is(tmp_path: Path) -> None:
    out = converted(tied(), tmp_path / "out", policy="torch-cuda")
    report = scan(open_source(str(out), SourceConfig()), policy="as-is", dtype="float16")
    assert report.verdict == "pass"
    inner = next(site for site in report.sites if site.site == "inner/linear")
    assert inner.precision == "float16"
    assert next(s for s in report.sites if s.site == "norm/layer_norm").precision == "float32"


def test_the_program_scans_a_converted_directory_in_its_own_format(tmp_path: Path, cli: Cli) -> None:
    out = converted(tied(), tmp_path / "out", policy="torch-cuda", dtype="bfloat16")
    done = cli("scan", out, "--format", "json")
    assert done.returncode == 0, done.stderr
    run = json.loads(done.stdout)["run"]
    assert (run["policy"], run["dtype"]) == ("as-is", "bfloat16")
