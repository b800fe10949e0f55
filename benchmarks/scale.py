"""Measures what shared audits cost: the size of records, and the time and memory of rank 0, which joins them.

Sizes are those of real records. For the fold, records of larger models are derived from that of BERT-base:
its sites under other names, with other numbers from a seed, as each rank would send them. Each fold runs in
its own process. ``benchmarks/scale_figures.py`` computes what docs/scale.md derives from the results.

    python -m benchmarks.scale [--repeats 9] [--json FILE]
"""

from __future__ import annotations

import json
import math
import multiprocessing
import random
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import torch
from torch import nn

from ampaudit.audit.config import ScanConfig
from ampaudit.audit.scan import scan_policies
from ampaudit.core.session import Progress, Session
from ampaudit.core.sites import SiteId
from ampaudit.parallel.identity import identity_of
from ampaudit.parallel.parts import FilePart, records_from_json, records_of_rank, records_to_json
from ampaudit.policy import load_policy
from ampaudit.run.record import RunRecord
from ampaudit.run.share import PartDone, PartRecords, joined_in_order
from ampaudit.source import Batch, ModelSource
from benchmarks.options import TINY_BERT, parser
from benchmarks.scan_overhead import _reset_peak, _resident, time_subject

BATCHES = 2
LIMIT = 500  # bytes per measured value and batch
# ranks, one batch each, and sites; the last is the target
FOLDS = ((10, 1000), (100, 1000), (1000, 1000), (10, 10_000), (100, 10_000), (1000, 10_000))
SCALED = (
    "ref_peak",
    "peak",
    "bad_ref_peak",
    "inside_peak",
    "err_sq",
    "ref_sq",
    "local_err_sq",
    "local_ref_sq",
)
NUMBER = 987_654  # placeholder for the number of the batch
DISTINCT = 4  # different records; ranks send them in rotation, each under its own batch's number


def bert(**size: int) -> tuple[nn.Module, list[Any]]:
    """BERT-base, 1 x 128."""
    from transformers import BertConfig, BertModel

    return BertModel(BertConfig(**size)).eval(), [
        {"input_ids": torch.randint(0, 30000, (1, 128))} for _ in range(BATCHES)
    ]


def llama() -> tuple[nn.Module, list[Any]]:
    """A LLaMA of 4 layers of 256, 1 x 128."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=1000, hidden_size=256, intermediate_size=688, num_hidden_layers=4, num_attention_heads=4
    )
    batches = [{"input_ids": torch.randint(0, 1000, (1, 128))} for _ in range(BATCHES)]
    return LlamaForCausalLM(config).eval(), batches


def resnet() -> tuple[nn.Module, list[Any]]:
    """A ResNet-50, 1 x 128 x 128."""
    from transformers import ResNetConfig, ResNetForImageClassification

    batches = [{"pixel_values": torch.randn(1, 3, 128, 128)} for _ in range(BATCHES)]
    return ResNetForImageClassification(ResNetConfig()).eval(), batches


def loss(output: Any) -> torch.Tensor:
    """Return a loss that fits any of the models."""
    return output.logits.float().square().mean()


class PartWithRecords(FilePart):
    """A part that keeps its records after its audit has ended."""

    records: dict[int, list[RunRecord]]

    def joined(self, phase: str, own: PartRecords, progress: Progress) -> list[RunRecord]:
        self.records = own.records
        return super().joined(phase, own, progress)


def recorded(
    case: Callable[[], tuple[nn.Module, list[Any]]], policy: str, *, backward: bool = False
) -> dict[int, list[RunRecord]]:
    """Return the records of an audit, by batch."""
    torch.manual_seed(0)
    model, batches = case()
    source = ModelSource("model", "object", model, tuple(Batch((), batch) for batch in batches), loss=loss)
    policies, share = [load_policy(policy)], PartWithRecords(0, 1, [])
    config = ScanConfig(backward=backward)
    share.describe("model", identity_of(source, policies, config))
    try:
        scan_policies(source, policies, config, Session(share=share))
    except PartDone:
        return share.records
    raise AssertionError("a part ends its audit")


def size(records: dict[int, list[RunRecord]]) -> dict[str, Any]:
    """Return bytes of JSON per site and batch, and per measured value (of sites or gradients)."""
    written = sum(len(records_to_json(record)) for record in records.values())
    sites = [len(record.observations) for found in records.values() for record in found]
    counts = [
        len(gradients.sites) + len(gradients.parameters)
        for found in records.values()
        for record in found
        if (gradients := record.parts.get("backward")) is not None
    ]
    return {
        "sites": sites[0],
        "gradients": counts[0] if counts else 0,
        "bytes_per_site": round(written / sum(sites), 1),
        "bytes_per_value": round(written / (sum(sites) + sum(counts)), 1),
    }


def enlarge(record: RunRecord, sites: int, rng: random.Random) -> RunRecord:
    """Return the record of a model with ``sites`` sites, with randomly scaled numbers."""
    known, observations = list(record.observations.items()), {}
    for number in range(sites):
        name, original = known[number % len(known)]
        shift = rng.randint(-3, 3)
        factor = 2.0**shift * rng.uniform(0.5, 1.0)
        scaled = {field: getattr(original, field) * factor for field in SCALED}
        bins = {exponent + shift: count for exponent, count in original.samples.exponents.items()}
        samples = replace(original.samples, exponents=bins, max_error=original.samples.max_error * factor)
        batch_peaks = {NUMBER: scaled["ref_peak"]}
        observations[SiteId(f"blocks.{number // len(known)}.{name}")] = replace(
            original, batch_peaks=batch_peaks, samples=samples, **scaled
        )
    return replace(record, observations=observations)


def sent_lines(lines: list[bytes], ranks: int) -> Iterator[bytes]:
    """Yield the line that each rank sends."""
    for rank in range(ranks):
        yield lines[rank % len(lines)].replace(b'"%d":' % NUMBER, b'"%d":' % rank)


def fold(record: bytes, ranks: int, sites: int, connection: Any) -> None:
    """Join the records of all ranks, and send the cost: seconds of one core, and megabytes of memory."""
    rng, (real,) = random.Random(0), records_from_json(record, "record")
    lines = [records_to_json([enlarge(real, sites, rng)]) for _ in range(DISTINCT)]
    reading = 0.0

    def read() -> Iterator[list[RunRecord]]:
        nonlocal reading
        for line in sent_lines(lines, ranks):
            started = time.process_time()
            found = records_of_rank(line, "rank")
            reading += time.process_time() - started
            yield found

    before = _resident("VmRSS")
    _reset_peak()
    started = time.process_time()
    (total,) = joined_in_order(read())
    seconds = time.process_time() - started
    assert (len(total.observations), total.batches) == (sites, ranks)
    connection.send(
        {
            "ranks": ranks,
            "sites": sites,
            "seconds": round(seconds, 4),
            "reading_s": round(reading, 2),
            "us_per_record_and_site": round(1e6 * seconds / ranks / sites, 2),
            "record_mb": round(len(lines[0]) / 1e6, 3),
            "memory_mb": round((_resident("VmHWM") - before) / 1e6, 1),
            "answer_mb": round(len(records_to_json([total.measured()])) / 1e6, 3),
        }
    )


def in_a_process(work: Callable[..., None], *arguments: Any) -> dict[str, Any]:
    """Run a function in a separate process, and return what it sends."""
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.get_context("spawn").Process(target=work, args=(*arguments, theirs))
    process.start()
    theirs.close()
    found: dict[str, Any] = ours.recv()
    process.join()
    return found


def reading(record: RunRecord, sites: int, repeats: int) -> dict[str, float]:
    """Return the milliseconds to write a batch's records, and to read them from a rank and from a file."""
    large = [enlarge(record, sites, random.Random(0))]
    line = records_to_json(large)
    ways: dict[str, Callable[[], Any]] = {
        "written": lambda: records_to_json(large),
        "from_a_rank": lambda: records_of_rank(line, "rank"),
        "from_a_file": lambda: records_from_json(line, "file"),
    }
    times: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            started = time.process_time()
            way()
            times[name].append(1000 * (time.process_time() - started))
    return {name: round(statistics.median(spent), 1) for name, spent in times.items()}


def power(rows: list[dict[str, Any]], axis: str) -> float:
    """Return the exponent of seconds against an axis, from the first row to the last; 1 is linear."""
    first, last = rows[0], rows[-1]
    return round(math.log(last["seconds"] / first["seconds"]) / math.log(last[axis] / first[axis]), 2)


def main(arguments: Sequence[str] | None = None) -> None:
    options = parser(__doc__, repeats=9).parse_args(arguments)
    torch.set_num_threads(1)
    cases = {
        "BERT-base, torch-cuda": (bert, "torch-cuda", False),
        "BERT-base, half": (bert, "half", False),
        "LLaMA of 4 layers, torch-cuda": (llama, "torch-cuda", False),
        "LLaMA of 4 layers, half, --backward": (llama, "half", True),
        "ResNet-50, torch-cuda": (resnet, "torch-cuda", False),
    }
    if options.smoke:
        cases = {"BERT-base, half": (lambda: bert(**TINY_BERT), "half", False)}
    sizes, real = {}, None
    for name, (case, policy, backward) in cases.items():
        records = recorded(case, policy, backward=backward)
        real = records[0][0] if name == "BERT-base, half" else real
        sizes[name] = size(records)
        print(f"{name}: {sizes[name]}")
    assert real is not None
    less = 100 if options.smoke else 1
    ways = reading(real, 10_000 // less, options.repeats)
    print(f"10,000 sites, ms: {ways}")
    rows = []
    for ranks, sites in FOLDS:
        rows.append(in_a_process(fold, records_to_json([real]), max(1, ranks // less), sites // less))
        print(rows[-1])
    exponents = {"ranks": power(rows[3:], "ranks"), "sites": power([rows[1], rows[4]], "sites")}
    print(f"exponents: {exponents}")
    overhead = time_subject("bert", options.repeats, torch.device("cpu"), smoke=options.smoke)
    print(f"scan of BERT-base: {overhead['ratio']['scan']}")
    if options.json:
        found = {
            "date": datetime.now(UTC).strftime("%Y-%m-%d"),
            "torch": torch.__version__,
            "threads": 1,
            "limit_bytes": LIMIT,
            "sizes": sizes,
            "record_of_10000_sites_ms": ways,
            "folds": rows,
            "exponents": exponents,
            "forwards": overhead,
        }
        options.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
