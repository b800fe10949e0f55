"""The catalogue of devices: its names, its rates against each other, and this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ampaudit.core.errors import UsageError
from ampaudit.devices.catalogue import Device, all_devices, device_named, nearest_device
from ampaudit.devices.host import cpu_flags, this_machine

Cli = Callable[..., subprocess.CompletedProcess[str]]
# names as torch.cuda.get_device_name gives them
TORCH_NAMES = {
    "Tesla P100-PCIE-16GB": "p100", "NVIDIA GeForce GTX 1080 Ti": "gtx1080ti", "Tesla V100-SXM2-32GB": "v100",
    "Tesla T4": "t4", "NVIDIA GeForce RTX 2080 Ti": "rtx2080ti", "NVIDIA A100-SXM4-40GB": "a100",
    "NVIDIA A100 80GB PCIe": "a100", "NVIDIA GeForce RTX 3090": "rtx3090", "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10",
    "NVIDIA RTX A6000": "rtx3090", "NVIDIA GeForce RTX 4090": "rtx4090", "NVIDIA L4": "l4",
    "NVIDIA L40S": "l40s",
    "NVIDIA H100 80GB HBM3": "h100", "NVIDIA H100 PCIe": "h100", "NVIDIA H200": "h200", "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 5090": "rtx5090", "AMD Instinct MI250X": "mi250x", "AMD Instinct MI300X": "mi300x",
    "NVIDIA RTX 6000 Ada Generation": "rtx4090",
}  # fmt: skip
DEVICES = list(all_devices().values())


@pytest.mark.parametrize(("name", "entry"), TORCH_NAMES.items())
def test_torchs_names_find_one_entry(name: str, entry: str) -> None:
    found = nearest_device(name, None)
    assert found is not None
    assert found.id == entry
    assert device_named(name).id == entry


def test_an_unknown_name_is_taken_by_its_capability() -> None:
    found = nearest_device("NVIDIA Something New", (9, 0))
    assert found is not None
    assert found.generation == "Hopper"
    assert nearest_device("NVIDIA Something New", (99, 0)) is None


@pytest.mark.parametrize("device", DEVICES, ids=lambda d: d.id)
def test_every_entry_says_where_it_is_from_and_is_plausible(device: Device) -> None:
    assert device.sources
    assert len(device.advice) > 20
    rates = [
        device.fp32,
        device.fp16,
        device.bf16,
        device.tensor.fp16,
        device.tensor.bf16,
        device.tensor.tf32,
    ]
    assert all(rate is None or rate > 0 for rate in rates)
    if device.tensor.fp16 and device.fp32:
        assert device.tensor.fp16 >= device.fp32
    if device.tensor.tf32 and device.tensor.fp16:
        assert device.tensor.fp16 / device.tensor.tf32 == pytest.approx(2, rel=0.05)
    if device.tensor.fp8 and device.tensor.fp16:
        assert device.tensor.fp8 / device.tensor.fp16 == pytest.approx(2, rel=0.03)
    if device.capability is not None and device.capability < (8, 0):  # CUDA C++ Programming Guide
        assert device.bf16 is None
        assert device.tensor.bf16 is None
        assert device.tensor.tf32 is None
    if device.capability is not None and device.capability < (8, 9):
        assert device.tensor.fp8 is None


def test_rates_of_float16_without_tensor_cores() -> None:
    """CUDA C++ Programming Guide, arithmetic instructions: float16 beside float32, by capability."""
    ratios = {(6, 0): 2, (6, 1): 1 / 64, (7, 0): 2, (7, 5): 2, (8, 0): 4, (8, 6): 1, (8, 9): 1, (9, 0): 2}
    for device in DEVICES:
        if device.capability in ratios and device.fp16 and device.fp32:
            assert device.fp16 / device.fp32 == pytest.approx(ratios[device.capability], rel=0.02), device.id


def test_a_rate_is_never_missing_where_there_is_float32() -> None:
    v100 = device_named("v100")
    assert v100.rate("float16", product=True) == 125
    assert v100.rate("float16", product=False) == 31.4
    assert v100.rate("bfloat16", product=True) == v100.fp32  # computed in float32
    assert v100.rate("tf32", product=True) == v100.fp32
    assert device_named("a100").rate("tf32", product=True) == 156


def test_this_machine_is_what_torch_says() -> None:
    machine = this_machine()
    assert machine.torch == torch.__version__
    cpu = machine.devices[-1]
    assert cpu.kind == "cpu"
    assert any(torch.backends.cpu.get_cpu_capability() in fact for fact in cpu.facts)
    assert len([d for d in machine.devices if d.kind == "cuda"]) == torch.cuda.device_count()
    assert machine.switches["torch.backends.cuda.matmul.allow_tf32"].startswith(
        str(torch.backends.cuda.matmul.allow_tf32)
    )


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        ("processor: 0\nflags\t\t: fpu amx_tile amx_bf16\n", {"fpu", "amx_tile", "amx_bf16"}),
        ("Features\t: fp asimd fphp bf16\n", {"fp", "asimd", "fphp", "bf16"}),
        ("", set()),
        ("flags\n", set()),
    ],
)
def test_flags_of_a_cpu(tmp_path: Path, text: str, flags: set[str]) -> None:
    (tmp_path / "cpuinfo").write_text(text)
    assert cpu_flags(tmp_path / "cpuinfo") == flags
    assert cpu_flags(tmp_path / "none") == set()


def test_the_command(cli: Cli) -> None:
    done = cli("devices", "--format", "json")
    found = json.loads(done.stdout)
    assert found["machine"]["devices"][-1]["kind"] == "cpu"
    assert [row["id"] for row in found["catalogue"]] == list(all_devices())
    one = cli("devices", "NVIDIA GeForce RTX 3090")
    assert "71 TFLOPS" in one.stdout
    assert "whitepaper" in one.stdout
    wrong = cli("devices", "a101")
    assert wrong.returncode == 2
    assert "did you mean 'a10" in wrong.stderr


def test_one_device_needs_no_torch() -> None:
    code = (
        "import sys\nsys.argv = ['ampaudit', 'devices', 'h100']\nfrom ampaudit.cli.main import run\n"
        "import atexit\natexit.register(lambda: print('torch' in sys.modules, file=sys.stderr))\nrun()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stderr.strip() == "False"


def test_names_that_are_none() -> None:
    with pytest.raises(UsageError, match="unknown device 'abacus'"):
        device_named("abacus")


@pytest.mark.gpu
def test_a_gpu_is_found_with_its_memory() -> None:
    first = this_machine().devices[0]
    assert first.kind == "cuda"
    assert first.name == torch.cuda.get_device_name(0)
    assert first.memory_bytes == torch.cuda.get_device_properties(0).total_memory
    assert first.entry is not None
