"""Measures what recording a call costs, against copying its inputs to a file and in memory, interleaved.

python -m benchmarks.recording [--repeats 15] [--json FILE]
"""

from __future__ import annotations

import json
import platform
import shutil
import statistics
import tempfile
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

import ampaudit
from benchmarks.options import parser
from benchmarks.timing import seconds


class DoesNothing(nn.Module):
    """Ignores its inputs, so that a recorded call costs nothing but its recording."""

    def forward(self, *args: Any, **kwargs: Any) -> None:
        return


def cache(layers: int, length: int) -> Any:
    from transformers import DynamicCache

    return DynamicCache(
        [(torch.randn(1, 8, length, 64), torch.randn(1, 8, length, 64)) for _ in range(layers)]
    )


TOKEN = {"one token": {"ids": torch.ones(1, 1, dtype=torch.long)}}


def inputs() -> dict[str, Any]:
    """Return calls of different sizes: of a decoder, of a diffusion model, and with large activations."""
    return TOKEN | {
        "a latent of 64 x 64 and its text": {"x": torch.randn(2, 4, 64, 64), "text": torch.randn(2, 77, 768)},
        "a cache of 12 layers, 512 tokens": {"past": cache(12, 512)},
        "activations of 128 MB": {"x": torch.randn(32, 1024, 1024)},
    }


def tensors(value: Any) -> list[torch.Tensor]:
    """Return every tensor among the inputs."""
    if isinstance(value, torch.Tensor):
        return [value]
    items = value if isinstance(value, list | tuple) else getattr(value, "__dict__", value)
    items = items.values() if isinstance(items, dict) else items if isinstance(items, list | tuple) else ()
    return [found for item in items for found in tensors(item)]


def write_tensors(values: list[torch.Tensor], path: Path) -> None:
    """Copy the tensors to a new file, and do nothing else."""
    with path.open("wb", buffering=0) as stream:
        for tensor in values:
            stream.write(tensor.numpy().data)


def measure(kwargs: dict[str, Any], repeats: int, folder: Path) -> dict[str, Any]:
    """Time a recorded call of a module that does nothing, and copies of its inputs, interleaved."""
    model, values = DoesNothing(), tensors(kwargs)
    times: list[tuple[float, float, float]] = []
    with ampaudit.record(model, folder / "calls", max_bytes="64GB", first=10**6) as recording:
        model(**kwargs)  # creates the directory
        for number in range(repeats):
            file = folder / f"{number}.bin"
            memory = seconds(lambda: [tensor.clone() for tensor in values])
            plain = seconds(lambda file=file: write_tensors(values, file))  # type: ignore[misc]
            times.append((seconds(lambda: model(**kwargs)), plain, memory))
            for old in (file, *(folder / "calls").glob("call-*")):
                old.unlink()
    assert recording.recorded == repeats + 1, recording
    shutil.rmtree(folder / "calls")
    recorded, plain, memory = (statistics.median(column) * 1e3 for column in zip(*times, strict=True))
    return {
        "bytes": sum(tensor.nbytes for tensor in values),
        "recording_ms": round(recorded, 3),
        "copy_to_a_file_ms": round(plain, 3),
        "copy_in_memory_ms": round(memory, 3),
        "times_a_copy_to_a_file": round(statistics.median(row[0] / row[1] for row in times), 2),
        "beyond_that_copy_ms": round(statistics.median(row[0] - row[1] for row in times) * 1e3, 3),
    }


def unrecorded(repeats: int, folder: Path) -> dict[str, Any]:
    """Measure how much longer the call of another module takes while a program is recorded."""
    model = nn.Identity()
    value = torch.ones(1)

    def calls() -> None:
        for _ in range(10_000):
            model(value)

    times: list[tuple[float, float]] = []
    for _ in range(repeats):
        plain = seconds(calls)
        with ampaudit.record(nn.Identity(), folder / "none"):
            times.append((seconds(calls), plain))
    return {"microseconds": round(statistics.median(a - b for a, b in times) / 10_000 * 1e6, 2)}


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, repeats=15).parse_args(arguments)
    torch.set_num_threads(1)
    found: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "machine": platform.processor()}
    with tempfile.TemporaryDirectory() as folder:
        for name, kwargs in (TOKEN if options.smoke else inputs()).items():
            found[name] = measure(kwargs, options.repeats, Path(folder))
            print(name, found[name])
        found["a call that is not recorded"] = unrecorded(options.repeats, Path(folder))
        print(found["a call that is not recorded"])
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
