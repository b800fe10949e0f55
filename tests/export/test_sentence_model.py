"""The trained sentence model, converted: loaded in fresh processes, four ways, and judged by embeddings."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import safetensors.torch
import torch

from ampaudit.core.source_config import SourceConfig
from ampaudit.export.config import ConvertConfig
from ampaudit.export.convert import convert
from ampaudit.export.manifest import read_manifest
from ampaudit.export.restore import restore
from ampaudit.export.verify import verify
from ampaudit.source import Batch, ModelSource
from ampaudit.source.open import open_source
from ampaudit.source.user_code import module_from_file
from tests.support.paths import ROOT

EXAMPLE = ROOT / "examples" / "sentence_encoder.py"
# an eps of float16, for embeddings of unit length
LARGEST_ERROR = 2.0**-10

COMMON = """
import sys, json, torch
from pathlib import Path
out = Path(sys.argv[1])
from safetensors.torch import load_file
batch = load_file(out.parent / "batch.safetensors")
def embedded(hidden):
    mask = batch["attention_mask"].unsqueeze(-1)
    pooled = (hidden.float() * mask).sum(1) / mask.sum(1)
    return torch.nn.functional.normalize(pooled, dim=-1).tolist()
"""
LOADERS = {
    "safetensors": """
from transformers import AutoConfig, AutoModel
model = AutoModel.from_config(AutoConfig.from_pretrained(out)).half().eval()
state = {k: v for k, v in load_file(out / "model.safetensors").items() if k != "embeddings.position_ids"}
missing, unexpected = model.load_state_dict(state, strict=False)
assert not missing and not unexpected, (missing, unexpected)
with torch.no_grad(): hidden = model(**batch).last_hidden_state
""",
    "pt2": """
program = torch.export.load(out / "model.pt2")
with torch.no_grad(): hidden = program.module()(**batch)["last_hidden_state"]
""",
    "onnxruntime": """
import onnxruntime
session = onnxruntime.InferenceSession(out / "model.onnx", providers=["CPUExecutionProvider"])
found = session.run(["last_hidden_state"], {k: v.numpy() for k, v in batch.items()})
hidden = torch.from_numpy(found[0])
""",
    "from_pretrained": """
from transformers import AutoModel
model = AutoModel.from_pretrained(out, dtype="auto").eval()
assert {p.dtype for p in model.parameters()} == {torch.float16}
stored = load_file(out / "model.safetensors")
assert all(torch.equal(p, stored[n]) for n, p in model.named_parameters())
with torch.no_grad(): hidden = model(**batch).last_hidden_state
""",
}


@pytest.fixture(scope="module")
def source() -> ModelSource:
    module = module_from_file(EXAMPLE)
    opened = open_source(str(module.model_directory()), SourceConfig())
    (batch, _) = module.batches()
    return ModelSource(
        opened.location, opened.kind, opened.model, (Batch((), dict(batch)),), sha256=opened.sha256
    )


@pytest.fixture(scope="module")
def out(source: ModelSource, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sentence")
    options = ConvertConfig(policy="keep-fp32-modules", onnx=True)
    _, made = convert(source, None, folder / "out", config=options)
    assert made is not None
    kwargs = {name: tensor.contiguous() for name, tensor in source.batches[0].kwargs.items()}
    safetensors.torch.save_file(kwargs, folder / "batch.safetensors")
    return folder / "out"


@pytest.fixture(scope="module")
def exact(source: ModelSource) -> torch.Tensor:
    batch = source.batches[0].kwargs
    with torch.no_grad():
        hidden = source.model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1)


@pytest.mark.parametrize("loader", LOADERS)
def test_a_fresh_process_computes_the_embeddings(out: Path, exact: torch.Tensor, loader: str) -> None:
    code = COMMON + LOADERS[loader] + "print(json.dumps(embedded(hidden)))"
    done = subprocess.run(
        [sys.executable, "-c", code, str(out)], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stderr
    found = torch.tensor(json.loads(done.stdout.splitlines()[-1]))
    error = float((found - exact).abs().max())
    print(f"{loader}: largest error of an embedding {error:.2g}")
    assert 0 < error < LARGEST_ERROR


def test_weights_halve_and_are_described(out: Path) -> None:
    original = Path(read_manifest(out).source) / "model.safetensors"
    assert (out / "model.safetensors").stat().st_size / original.stat().st_size < 0.501
    assert (out / "master.safetensors").stat().st_size / original.stat().st_size > 0.99
    config = json.loads((out / "config.json").read_text())
    assert config["dtype"] == "float16"
    assert (out / "tokenizer.json").is_file()
    assert (out / "1_Pooling" / "config.json").is_file()


def test_masters_restore_the_file_bit_for_bit(out: Path, tmp_path: Path) -> None:
    restore(out, tmp_path / "back", force=False)
    original = Path(read_manifest(out).source) / "model.safetensors"
    assert (tmp_path / "back" / "model.safetensors").read_bytes() == original.read_bytes()
    assert json.loads((tmp_path / "back" / "config.json").read_text())["dtype"] == "float32"


def test_it_verifies(out: Path) -> None:
    found = verify(out)
    assert found.problems == ()
    assert all(line.endswith("the same bits") for line in found.outputs)


def test_an_autocast_plan_loads_in_float32_and_says_so(source: ModelSource, tmp_path: Path) -> None:
    from transformers import AutoModel

    options = ConvertConfig(policy="torch-cuda", program=False)
    _, made = convert(source, None, tmp_path / "out", config=options)
    assert made is not None
    assert any("from_pretrained" in note for note in made.notes)
    model = AutoModel.from_pretrained(tmp_path / "out", dtype="auto")
    assert {p.dtype for p in model.parameters()} == {torch.float32}
    before = dict(source.model.named_parameters())
    query = "encoder.layer.0.attention.self.query.weight"
    table = "embeddings.word_embeddings.weight"
    now = dict(model.named_parameters())
    assert torch.equal(now[query], before[query].half().float())
    assert torch.equal(now[table], before[table])
