"""A model that is sharded over processes already is refused in one line, by every function and command."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import Replicate, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, parallelize_module

import ampaudit
from ampaudit.cli.program import main
from ampaudit.core.errors import InputError, SourceError

NEXT = "pass the module before it goes through fully_shard, FSDP or parallelize_module"


@pytest.fixture(scope="module")
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)  # type: ignore[attr-defined]
    yield init_device_mesh("cpu", (1,))
    dist.destroy_process_group()


def plain() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))


def fsdp2(mesh: DeviceMesh) -> nn.Module:
    return fully_shard(plain(), mesh=mesh)


def fsdp2_layer(mesh: DeviceMesh) -> nn.Module:
    model = plain()
    fully_shard(model[2], mesh=mesh)
    return model


def tensor_parallel(mesh: DeviceMesh) -> nn.Module:
    return parallelize_module(plain(), mesh, {"2": ColwiseParallel()})


def fsdp1(mesh: DeviceMesh) -> nn.Module:
    return FullyShardedDataParallel(plain(), device_id=torch.device("cpu"))


KINDS: dict[Callable[[DeviceMesh], nn.Module], str] = {
    fsdp2: "the model (FSDPSequential) is sharded over processes already (fully_shard)",
    fsdp2_layer: "layer 2 is sharded over processes already (fully_shard)",
    tensor_parallel: "2.weight is sharded over processes already (a DTensor, as of parallelize_module)",
    fsdp1: (
        "the model (FullyShardedDataParallel) is sharded over processes already (FullyShardedDataParallel)"
    ),
}
FUNCTIONS: dict[str, Callable[[nn.Module, torch.Tensor, Path], object]] = {
    "scan": lambda model, x, _: ampaudit.scan(model, x),
    "against": lambda model, x, _: ampaudit.scan(plain(), x, against=model),
    "plan": lambda model, x, _: ampaudit.plan(model, x),
    "tune": lambda model, x, _: ampaudit.tune(model, x),
    "bench": lambda model, x, _: ampaudit.bench(model, x),
    "convert": lambda model, x, folder: ampaudit.convert(model, x, folder / "made"),
    "train": lambda model, x, _: ampaudit.train(model, [x], steps=1),
    "assert_safe": lambda model, x, _: ampaudit.assert_safe(model, x),
}


@pytest.mark.filterwarnings("ignore:FSDP is switching", "ignore:When using")
@pytest.mark.parametrize("make", KINDS, ids=lambda make: make.__name__)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_sharded_model_is_refused(
    mesh: DeviceMesh, tmp_path: Path, name: str, make: Callable[[DeviceMesh], nn.Module]
) -> None:
    with pytest.raises(SourceError) as caught:
        FUNCTIONS[name](make(mesh), torch.ones(2, 4), tmp_path)
    assert str(caught.value).splitlines()[0] == KINDS[make]
    assert (caught.value.hint, caught.value.exit_code) == (NEXT, 2)


def test_a_sharded_input_is_refused(mesh: DeviceMesh) -> None:
    with pytest.raises(InputError, match=r"input\[0\] is spread over processes"):
        ampaudit.scan(plain(), distribute_tensor(torch.ones(2, 4), mesh, [Replicate()]))


FILE = """
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

def get_model():
    if not dist.is_initialized():
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return fully_shard(nn.Sequential(nn.Linear(4, 2)), mesh=init_device_mesh("cpu", (1,)))

def example_inputs():
    return torch.ones(2, 4)
"""


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "model.py"
    path.write_text(FILE, encoding="utf-8")
    return path


@pytest.mark.parametrize(
    "words", ["scan", "plan", "tune -o made.yaml", "bench", "convert -o made", "train --steps 1"]
)
def test_a_file_that_returns_a_sharded_model_is_refused(mesh: DeviceMesh, file: Path, words: str) -> None:
    command, *options = words.split()
    error = CliRunner().invoke(main, [command, file.name, *options]).exception
    assert isinstance(error, SourceError)
    assert (str(error).splitlines()[0], error.hint) == (KINDS[fsdp2], NEXT)


@pytest.mark.parametrize("command", ["scan", "check"])
def test_the_program_says_so_without_a_traceback(file: Path, command: str) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ampaudit", command, file.name],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    said = " ".join((done.stdout + done.stderr).split())
    assert KINDS[fsdp2] in said
    assert NEXT in said
    assert "Traceback" not in said
    assert done.returncode == 2
