"""The figures of docs/scale.md are those of the kept result, and follow from the inputs that it names."""

from __future__ import annotations

import json
import re

import pytest

from ampaudit.devices.catalogue import device_named
from benchmarks.scale_figures import MACHINE, MODELS, PAGE, RESULT, rewritten
from tests.support.paths import ROOT

TEXT = PAGE.read_text(encoding="utf-8")


def rows(name: str) -> dict[str, list[str]]:
    """Return the cells of a table, by the first of a row."""
    inside = re.search(f"<!-- {name} -->\n(.*?)<!-- end of {name} -->", TEXT, re.S)
    assert inside is not None
    lines = [[cell.strip() for cell in line.split("|")[1:-1]] for line in inside[1].splitlines()]
    return {first: rest for first, *rest in lines}


def numbers(cells: list[str]) -> list[float]:
    return [float(cell.split()[0].replace(",", "")) for cell in cells]


def test_the_page_is_what_the_script_writes() -> None:
    assert rewritten(TEXT) == TEXT, "python -m benchmarks.scale_figures"
    assert rewritten(TEXT.replace("| 70.6 billion |", "| 71 billion |")) == TEXT


def test_the_models_have_their_published_sizes() -> None:
    """Meta and DeepSeek state 70.6 billion weights, and 671 of which 37 are active."""
    dense, experts = MODELS
    assert dense.parameters == pytest.approx(70.55e9, rel=1e-3)
    assert experts.parameters == pytest.approx(671e9, rel=1e-3)
    assert experts.used == pytest.approx(37e9, rel=0.02)


def test_the_gpu_is_that_of_the_catalogue() -> None:
    h200 = device_named("h200")
    assert h200.bandwidth_gbs * 1e9 == MACHINE.bandwidth
    assert h200.fp32 * 1e12 == MACHINE.fp32
    assert MACHINE.memory / 1e9 == pytest.approx(h200.memory_gb, rel=0.06)


def test_a_reader_can_compute_the_hours_from_the_page() -> None:
    """From P, c and F as printed, with the rates in the text."""
    found = rows("models")
    assert all(text in TEXT for text in ("64 batches", "67 TFLOP/s", "link: 50 GB/s", "disk: 6 GB/s"))
    c = float(rows("forwards")["a scan, per batch (c)"][0])
    weights, work = numbers(found["P, weights"]), numbers(found["F, operations of a forward pass"])
    for place, (billions, operations) in enumerate(zip(weights, work, strict=True)):
        moved, spent = 4 * billions, 64 * c * operations / 33.5e12
        hours = {
            "**hours on 1 H200**, from host memory": moved / 50 + spent,
            "**hours on 1 H200**, from one disk": moved / 6 + spent,
            "**hours on 8 H200**, from host memory": moved / 50 + spent / 8,
            "**hours on 8 H200**, from one disk": 8 * moved / 6 + spent / 8,
        }
        for name, seconds in hours.items():
            assert numbers(found[name])[place] == pytest.approx(seconds / 3600, abs=0.011), name


def test_operations_are_those_of_the_published_layers() -> None:
    """The dense model's, by hand: 2 per token and weight of its products, and those of QK and AV."""
    layer = 2 * 8192 * 8192 + 2 * 8192 * 1024 + 3 * 8192 * 28672
    products = 2 * 2048 * (80 * layer + 8192 * 128256)
    attention = 80 * 64 * 2 * (2 * 2048 * 2048 * 128)
    assert MODELS[0].operations == products + attention


def test_the_kept_result_meets_its_aims() -> None:
    found = json.loads(RESULT.read_text(encoding="utf-8"))
    assert max(row["bytes_per_value"] for row in found["sizes"].values()) <= found["limit_bytes"] == 500
    assert {(row["ranks"], row["sites"]) for row in found["folds"]} >= {(1000, 10_000), (10, 10_000)}
    assert all(0.8 < power < 1.2 for power in found["exponents"].values())
    words = (ROOT / "benchmarks" / "README.md").read_text(encoding="utf-8")
    largest = found["folds"][-1]
    assert f"takes {largest['seconds']:.0f} s of one core" in words
    assert f"{largest['memory_mb'] / 1000:.1f} GB" in words
