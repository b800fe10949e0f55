"""Writes the figures of docs/scale.md between markers: measured ones, and estimates for large models.

The estimates were not run. Their inputs are ``MODELS``, ``MACHINE`` and the dated result of
``benchmarks/scale.py``; rates and memory of the GPU are the vendor's.

    python -m benchmarks.scale_figures
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.options import parser

ROOT = Path(__file__).resolve().parents[1]
RESULT = ROOT / "benchmarks" / "results" / "2026-11-23-cpu-scale.json"
PAGE = ROOT / "docs" / "scale.md"
BATCHES, TOKENS = 64, 2048  # of a batch
PAIR = 4 + 2  # bytes of a number of both runs: float32, and 16 bits


@dataclass(frozen=True)
class Machine:
    """The capacities of a GPU and its host.

    Attributes:
        memory: bytes of one GPU.
        fp32: operations per second, without TF32.
        reached: the share of that rate that matrix products reach; an assumption.
        bandwidth: bytes per second of the GPU's memory.
        link: bytes per second from the host's memory to one GPU; each GPU has its own.
        disk: bytes per second from one disk, which all GPUs of a host share.
    """

    memory: float = 139 * 2.0**30
    fp32: float = 67e12
    reached: float = 0.5
    bandwidth: float = 4.8e12
    link: float = 50e9
    disk: float = 6e9


@dataclass(frozen=True)
class Model:
    """A language model, by the numbers of its published configuration.

    Attributes:
        name: its heading in the table.
        layers: number of layers.
        hidden: width of the residual stream.
        vocabulary: rows of the embedding, and of the head, which is not tied to it.
        attention: weights of the attention of a layer.
        heads: of attention.
        key: width of queries and keys of a head.
        value: width of the values of a head.
        dense: width inside the feed-forward of layers without experts.
        expert: width inside an expert.
        experts: of a layer, with the shared one.
        chosen: experts that a token passes, with the shared one.
        without_experts: layers whose feed-forward is dense.
    """

    name: str
    layers: int
    hidden: int
    vocabulary: int
    attention: int
    heads: int
    key: int
    value: int
    dense: int
    expert: int = 0
    experts: int = 0
    chosen: int = 0
    without_experts: int = 0

    @property
    def embedding(self) -> int:
        return self.vocabulary * self.hidden

    def layer(self, experts: int) -> int:
        """Weights of a layer, or of what a token passes in it."""
        if not experts:
            return self.attention + 3 * self.hidden * self.dense
        router = self.hidden * (self.experts - 1)
        return self.attention + experts * 3 * self.hidden * self.expert + router

    def _stack(self, experts: int) -> int:
        dense = self.layers if not self.experts else self.without_experts
        return dense * self.layer(0) + (self.layers - dense) * self.layer(experts)

    @property
    def parameters(self) -> int:
        """All weights but those of norms."""
        return 2 * self.embedding + self._stack(self.experts)

    @property
    def used(self) -> int:
        """Weights that are multiplied with a token: the embedding is only looked up."""
        return self.embedding + self._stack(self.chosen)

    @property
    def operations(self) -> float:
        """Of one forward pass of a batch: two per weight and token, and the products of attention."""
        attention = 2.0 * TOKENS**2 * self.heads * (self.key + self.value) * self.layers
        return 2.0 * self.used * TOKENS + attention

    @property
    def largest_value(self) -> int:
        """Elements of the largest value: scores of attention that is not fused, logits, or feed-forward."""
        return max(self.heads * TOKENS**2, TOKENS * self.vocabulary, TOKENS * self.dense)


MACHINE = Machine()
MODELS = (
    Model(
        "70B dense", layers=80, hidden=8192, vocabulary=128_256, heads=64, key=128, value=128, dense=28_672,
        attention=2 * 8192 * 8192 + 2 * 8192 * 1024,  # queries and output; keys and values of 8 heads
    ),
    Model(
        "671B, experts", layers=61, hidden=7168, vocabulary=129_280, heads=128, key=192, value=128,
        dense=18_432, expert=2048, experts=257, chosen=9, without_experts=3,
        # queries through 1536, keys and values through 512 and 64 that all heads share, output
        attention=7168 * 1536 + 1536 * 128 * 192 + 7168 * (512 + 64) + 512 * 128 * 256 + 128 * 128 * 7168,
    ),
)  # fmt: skip


@dataclass(frozen=True)
class Cost:
    """The cost of an audit of 64 batches, if each weight is moved once.

    Attributes:
        model: the audited model.
        forwards: cost of a batch in plain forward passes.
    """

    model: Model
    forwards: float

    @property
    def weights(self) -> float:
        """Bytes of all weights in FP32: what each GPU is given once per pass."""
        return 4.0 * self.model.parameters

    @property
    def batch_seconds(self) -> float:
        return self.forwards * self.model.operations / (MACHINE.fp32 * MACHINE.reached)

    def moving(self, gpus: int, *, disk: bool) -> float:
        """Seconds in which weights are moved: each GPU has a link, and all read from one disk in turn."""
        return gpus * self.weights / MACHINE.disk if disk else self.weights / MACHINE.link

    def hours(self, gpus: int, *, disk: bool) -> float:
        """Of a pass: moves and computation one after the other, though they may overlap."""
        return (self.moving(gpus, disk=disk) + BATCHES / gpus * self.batch_seconds) / 3600


def _gb(size: float) -> str:
    return f"{size / 1e9:,.0f} GB" if size >= 1e10 else f"{size / 1e9:.1f} GB"


def _time(seconds: float) -> str:
    return f"{seconds:.1f} s" if seconds < 100 else f"{seconds / 60:,.0f} min"


def models(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the table of large models."""
    costs = [Cost(model, found["forwards"]["ratio"]["scan"]["median"]) for model in MODELS]
    first = [cost.model for cost in costs]
    yield ("", *(model.name for model in first))
    yield ("P, weights", *(f"{m.parameters / 1e9:,.1f} billion" for m in first))
    yield ("U, of which a token meets", *(f"{m.used / 1e9:.1f} billion" for m in first))
    yield ("all weights in FP32, 4 P", *(_gb(c.weights) for c in costs))
    yield ("H200 that hold 4 P", *(f"{c.weights / MACHINE.memory:.1f}" for c in costs))
    yield ("largest layer, 6 bytes a weight", *(_gb(PAIR * m.layer(m.experts)) for m in first))
    yield ("largest value inside, 6 bytes an element", *(_gb(PAIR * m.largest_value) for m in first))
    edges = [BATCHES * TOKENS * m.hidden * PAIR for m in first]
    yield ("values between two layers, all batches", *map(_gb, edges))
    yield ("F, operations of a forward pass", *(f"{m.operations:.2e}" for m in first))
    yield ("c F / r, one batch", *(_time(c.batch_seconds) for c in costs))
    reads = [PAIR * m.parameters / MACHINE.bandwidth for m in first]
    yield ("reading 6 P from the GPU's memory, one batch", *map(_time, reads))
    yield ("4 P / link, once per pass", *(_time(c.moving(1, disk=False)) for c in costs))
    yield ("4 P / disk, once per pass", *(_time(c.moving(1, disk=True)) for c in costs))
    for gpus in (1, 8):
        for disk in (False, True):
            name = f"**hours on {gpus} H200**, from {'one disk' if disk else 'host memory'}"
            yield (name, *(f"{c.hours(gpus, disk=disk):.2f}" for c in costs))


def sizes(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the table of record sizes."""
    yield ("audit", "sites", "gradients", "bytes per site and batch", "per measured value")
    for name, row in found["sizes"].items():
        measured = (row["sites"], row["gradients"], f"{row['bytes_per_site']:.0f}")
        yield (name, *map(str, measured), f"{row['bytes_per_value']:.0f}")


def folds(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the table of folds."""
    yield ("ranks", "sites", "seconds", "of which reading", "microseconds per record and site", "memory")
    for row in found["folds"]:
        numbers = (
            f"{row['ranks']:,}",
            f"{row['sites']:,}",
            f"{row['seconds']:.1f}",
            f"{row['reading_s']:.1f}",
        )
        yield (*numbers, f"{row['us_per_record_and_site']:.0f}", f"{row['memory_mb']:,.0f} MB")


def reading(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the table of ways to read and write a record."""
    yield ("a record of 10,000 sites", "milliseconds")
    for name, spent in found["record_of_10000_sites_ms"].items():
        yield (name.replace("_", " ").replace("from", "read from"), f"{spent:.0f}")


def forwards(found: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Rows of the table of a batch's cost."""
    yield ("", "in plain forward passes", "spread")
    for name, title in (("scan", "a scan, per batch (c)"), ("ranges", "`--ranges`, FP32 only")):
        row = found["forwards"]["ratio"][name]
        yield (title, f"{row['median']:.2f}", f"{row['low']:.2f} to {row['high']:.2f}")
    plain, trace = found["forwards"]["plain_seconds"], found["forwards"]["trace_seconds"]["scan"]
    yield ("tracing, once", f"{trace / plain:.1f}", "")


TABLES = {"forwards": forwards, "sizes": sizes, "folds": folds, "reading": reading, "models": models}


def table(name: str) -> str:
    """Return a table in Markdown."""
    head, *rows = TABLES[name](json.loads(RESULT.read_text(encoding="utf-8")))
    rule = ("---", *("--:" for _ in head[1:]))
    return "".join(f"| {' | '.join(row)} |\n" for row in (head, rule, *rows))


def rewritten(text: str) -> str:
    """Return the page with the current tables."""
    for name in TABLES:
        begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
        before, _, rest = text.partition(begin)
        text = f"{before}{begin}{table(name)}{end}{rest.partition(end)[2]}"
    return text


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__).parse_args(arguments)
    text = rewritten(PAGE.read_text(encoding="utf-8"))
    if options.smoke:
        print(text)
    else:
        PAGE.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
