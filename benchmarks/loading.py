"""Measures what reading a model's files as data costs, in multiples of torch's own loaders, interleaved.

Torch's loaders are ``torch.export.load`` for exported programs and
``torch.load(weights_only=True, mmap=True)`` for checkpoints.

    python -m benchmarks.loading [--repeats 9] [--json FILE]
"""

from __future__ import annotations

import json
import platform
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampaudit.checkpoint.pickled import read_state_dict
from ampaudit.source.exported import read_program
from benchmarks.options import parser
from benchmarks.timing import seconds

LIMIT = 1.5
Pair = tuple[str, Callable[[], Any], Callable[[], Any]]


def stack(layers: int) -> nn.Module:
    blocks = (nn.Sequential(nn.Linear(64, 64), nn.LayerNorm(64), nn.GELU()) for _ in range(layers))
    return nn.Sequential(*blocks)


def bert() -> tuple[nn.Module, dict[str, torch.Tensor]]:
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig()).eval(), {"input_ids": torch.ones(2, 16, dtype=torch.long)}


def pairs(folder: Path, *, smoke: bool) -> Iterator[Pair]:
    """Return our reader and torch's of each file, by name."""
    torch.save({f"layers.{i}.weight": torch.randn(8, 8) for i in range(2000)}, folder / "many.pt")
    yield "checkpoint of 2,000 tensors", *checkpoints(folder / "many.pt")
    for layers in (1,) if smoke else (1, 10, 100, 400):
        path = folder / f"{layers}.pt2"
        torch.export.save(torch.export.export(stack(layers).eval(), (torch.randn(2, 64),)), path)
        yield f"program of {3 * layers} ops", *loaders(path)
    if smoke:
        return
    model, inputs = bert()
    torch.export.save(torch.export.export(model, (), inputs, strict=False), folder / "bert.pt2")
    yield "program of BERT-base (440 MB)", *loaders(folder / "bert.pt2")
    torch.save(model.state_dict(), folder / "bert.pt")
    yield "checkpoint of BERT-base (440 MB)", *checkpoints(folder / "bert.pt")


def loaders(path: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return lambda: read_program(path), lambda: torch.export.load(path)


def checkpoints(path: Path) -> tuple[Callable[[], Any], Callable[[], Any]]:
    return lambda: read_state_dict(path), lambda: torch.load(path, weights_only=True, mmap=True)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, repeats=9).parse_args(arguments)
    found: dict[str, Any] = {"date": datetime.now(UTC).date().isoformat(), "machine": platform.processor()}
    with tempfile.TemporaryDirectory() as folder:
        for name, ours, theirs in pairs(Path(folder), smoke=options.smoke):
            ours(), theirs()  # the first call imports
            times = [(seconds(ours), seconds(theirs)) for _ in range(options.repeats)]
            ratios = sorted(one / other for one, other in times)
            middle = statistics.median(ratios)
            found[name] = {
                "ours_s": statistics.median(one for one, _ in times),
                "torch_s": statistics.median(other for _, other in times),
                "ratio": middle,
                "least": ratios[0],
                "most": ratios[-1],
            }
            verdict = "within" if middle <= LIMIT else "ABOVE"
            print(
                f"{name:34} {found[name]['ours_s']:7.3f} s, torch {found[name]['torch_s']:7.3f} s: "
                f"{middle:.2f} x ({ratios[0]:.2f} to {ratios[-1]:.2f}), {verdict} {LIMIT} x"
            )
    if options.json:
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
