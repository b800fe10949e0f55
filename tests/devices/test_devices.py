"""The catalogue of devices: its names, its rates against each other, and this machine."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest
import torch

from ampaudit.core.errors import UsageError
from ampaudit.devices.catalogue import Device, all_devices, device_named, nearest_device
from ampaudit.devices.host import cpu_flags, this_machine

Cli = Callable[..., subprocess.CompletedProcess[str]]
# names as torch.cuda.get_device_name gives them
TORCH_NAMES = {
    "Tesla P100-PCIE-16GB": "p100-pcie",
    "NVIDIA GeForce GTX 1080 Ti": "gtx1080ti",
    "Tesla V100-SXM2-32GB": "v100",
    "Tesla V100-SXM2-16GB": "v100-16gb",
    "Tesla V100-PCIE-16GB": "v100-pcie-16gb",
    "Tesla T4": "t4",
    "Quadro RTX 8000": "quadrortx8000",
    "NVIDIA GeForce RTX 2080 Ti": "rtx2080ti",
    "NVIDIA GeForce RTX 2060": "rtx2060",
    "NVIDIA A100-SXM4-80GB": "a100",
    "NVIDIA A100-SXM4-40GB": "a100-40gb",
    "NVIDIA A100 80GB PCIe": "a100-pcie",
    "NVIDIA A30": "a30",
    "NVIDIA GeForce RTX 3090": "rtx3090",
    "NVIDIA GeForce RTX 3060": "rtx3060",
    "NVIDIA GeForce RTX 3060 Ti": "rtx3060ti",
    "NVIDIA A10": "a10",
    "NVIDIA A10G": "a10g",
    "NVIDIA RTX A2000": "rtxa2000",
    "NVIDIA RTX A6000": "rtxa6000",
    "NVIDIA GeForce RTX 4090": "rtx4090",
    "NVIDIA GeForce RTX 4070 Ti SUPER": "rtx4070tisuper",
    "NVIDIA L4": "l4",
    "NVIDIA L40": "l40",
    "NVIDIA L40S": "l40s",
    "NVIDIA RTX 6000 Ada Generation": "rtx6000ada",
    "NVIDIA H100 80GB HBM3": "h100",
    "NVIDIA H100 PCIe": "h100-pcie",
    "NVIDIA H100 NVL": "h100-nvl",
    "NVIDIA H200": "h200",
    "NVIDIA GH200 480GB": "gh200",
    "NVIDIA B200": "b200",
    "NVIDIA GeForce RTX 5090": "rtx5090",
    "NVIDIA RTX PRO 6000 Blackwell Server Edition": "rtxpro6000",
    "AMD Instinct MI210": "mi210",
    "AMD Instinct MI250X / MI250": "mi250x",
    "AMD Instinct MI300X": "mi300x",
    "AMD Instinct MI355X": "mi355x",
    "AMD Radeon RX 7900 XTX": "rx7900xtx",
    "AMD Radeon RX 9070 XT": "rx9070xt",
}
# devices that are not listed, and the entry that stands for their generation
UNLISTED = {
    "NVIDIA GeForce RTX 3060 Laptop GPU": "rtx3090",
    "NVIDIA TITAN V": "v100",
    "NVIDIA GeForce GTX 1630": "gtx1660ti",
    "NVIDIA A16": "a10",
    "NVIDIA GeForce RTX 4090 Laptop GPU": "rtx4090",
    "NVIDIA RTX 3500 Ada Generation": "l4",
    "NVIDIA H800 PCIe CC": "h100",
    "NVIDIA RTX PRO 2000 Blackwell": "rtxpro6000",
    "AMD Instinct MI308X": "mi300x",
    "AMD Radeon RX 7650 GRE": "rx7900xtx",
    "Apple M4 Max": "m2",
}
DEVICES = list(all_devices().values())


@pytest.mark.parametrize(("name", "entry"), TORCH_NAMES.items())
def test_torchs_names_find_one_entry(name: str, entry: str) -> None:
    found = nearest_device(name, None)
    assert found is not None
    assert found.id == entry
    assert device_named(name).id == entry


@pytest.mark.parametrize(("name", "like"), UNLISTED.items())
def test_a_device_that_is_not_listed_has_no_numbers_of_another(name: str, like: str) -> None:
    """The memory of an RTX 3090 was once predicted for an RTX 3060."""
    found, entry = device_named(name), all_devices()[like]
    assert (found.like, found.generation, found.capability) == (like, entry.generation, entry.capability)
    assert found.name.startswith(name)
    assert (found.memory_gb, found.bandwidth_gbs, found.fp32, found.fp16, found.bf16) == (None,) * 5
    assert set(asdict(found.tensor).values()) == {None}
    assert found.products == entry.products


def test_every_name_of_a_device_is_its_own() -> None:
    """Ids and names find one device each, and none finds another's."""
    for device in DEVICES:
        assert device_named(device.id).id == device.id
        bare = device.name.partition(" (")[0]
        found = device_named(bare) if device.capability or device.like else device
        assert found.id == device.id or found.memory_gb in (None, device.memory_gb), bare


def test_an_unknown_name_is_taken_by_its_capability() -> None:
    found = nearest_device("NVIDIA Something New", (9, 0))
    assert found is not None
    assert found.generation == "Hopper"
    assert found.memory_gb is None
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
