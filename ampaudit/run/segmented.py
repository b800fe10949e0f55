"""Runs all batches through one segment of the program at a time.

Every weight is held while all batches pass its segment, and then freed, so that it is moved, or read from
disk, once for a run over all batches. Batches in which something breaks pass all segments once more, with
repairs.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import psutil
import torch
from torch import nn

from ampaudit.core.config import Progress
from ampaudit.core.errors import AuditError
from ampaudit.core.files import temporary_directory
from ampaudit.run.eager import telling_own_failures
from ampaudit.run.lockstep import LockStep
from ampaudit.run.meter import Meter
from ampaudit.run.observer import Pair
from ampaudit.run.passage import BatchCall, Parking, Passage
from ampaudit.run.prepared import Judged, PreparedBatch
from ampaudit.run.program import Program
from ampaudit.run.record import RunRecord
from ampaudit.run.repair import RepairingMeter
from ampaudit.run.route import Again, Route
from ampaudit.run.runner import Runner
from ampaudit.run.segments import Segment, aligned_ends, cut_evenly, cut_program
from ampaudit.run.share import Failure, PartRecords, Share
from ampaudit.source.interface import Batch

__all__ = ["run_segmented"]

Key = tuple[int, int]  # number of the batch, and of the policy


def run_segmented(
    model: nn.Module,
    runners: Sequence[Runner],
    batches: Sequence[Batch],
    share: Share,
    phase: str,
    progress: Progress,
) -> PartRecords:
    """Run batches under every policy, all of them through one segment at a time.

    Args:
        model: the user's.
        runners: one for each policy.
        batches: of all machines.
        share: which of them, and which segments, this machine runs.
        phase: of the audit.
        progress: told each step of the way.

    Returns:
        The records of all batches that ended in this process, and the first error.
    """
    known: dict[int, list[RunRecord]] = {}
    work, failure = _Segmented(model, runners, share, phase, progress), None
    try:
        for number, batch in enumerate(batches):
            progress(phase, number, len(batches))
            if (earlier := share.recorded(phase, number)) is not None:
                known[number] = earlier
            work.prepare(number, batch, mine=earlier is None and share.mine(phase, number))
        work.run()
    except AuditError as error:
        if len(batches) > 1:
            error.add_place(batches[work.at].title(work.at))
        if share.alone:
            raise
        failure = Failure.of(work.at, error)
    return PartRecords(known | work.done, failure)


@dataclass
class _Segmented:
    """The batches of one phase of an audit.

    Attributes:
        at: number of the batch that is run.
        done: the records of batches that have ended, under each policy.
    """

    model: nn.Module
    runners: Sequence[Runner]
    share: Share
    phase: str
    progress: Progress
    at: int = 0
    done: dict[int, list[RunRecord]] = field(default_factory=dict)
    _ready: dict[Key, PreparedBatch] = field(default_factory=dict)
    _records: dict[Key, list[RunRecord]] = field(default_factory=dict)
    _judged: dict[Key, Judged] = field(default_factory=dict)
    _ended: set[Key] = field(default_factory=set)

    @property
    def _route(self) -> Route:
        return self.share.route

    def prepare(self, number: int, batch: Batch, *, mine: bool) -> None:
        """Trace a batch under every policy, and check it if it is run here."""
        self.at = number
        with telling_own_failures(self.model, batch):
            for policy, runner in enumerate(self.runners):
                if mine:
                    self._ready[number, policy] = runner.prepare(batch, number)
                    self._keep_record((number, policy))
                if not (mine and self._route.ends):
                    runner.skip(batch, number)
                    runner.end_batch()

    def run(self) -> None:
        """Run all batches, and once more those in which something breaks."""
        if not self._ready:
            return
        first = next(iter(self._ready.values())).executor.program
        segments = self._cut(first)
        with self._parking(segments) as parking:
            way = _Way(segments, first, self._route)
            meters = [self._call(key, ready.meter) for key, ready in self._ready.items()]
            for call, outputs in self._through(way, parking, "1", meters):
                self._judge(call, outputs)
            again = self._route.agreed(self.phase, self._broken() if self._judged else None)
            repairing = [
                self._call(key, self.runners[key[1]].repairing(self._ready[key], masks))
                for number, policies in again.items()
                for key, masks in (((number, policy), masks) for policy, masks in policies.items())
            ]
            for call, outputs in self._through(way, parking, "2", repairing):
                self._conclude(call, outputs)

    def _cut(self, program: Program) -> tuple[Segment, ...]:
        memory, stages = self.runners[0].config.memory, self._route.stages()
        limit = None if memory is None else self._route.limit(memory)
        segments = cut_program(program, limit, len(self.runners))
        return cut_evenly(program, stages) if len(segments) < stages else segments

    @contextmanager
    def _parking(self, segments: Sequence[Segment]) -> Iterator[Parking]:
        """Let boundaries wait on the device if that is the host, on the host, or else on disk."""
        config = self.runners[0].config
        waiting = max(segment.boundary_bytes for segment in segments) * len(self._ready)
        on_host = config.device.type != "cpu"
        largest = max(segment.bytes for segment in segments)
        room = psutil.virtual_memory().available // 2
        if not on_host and config.memory is not None:
            room = min(room, config.memory - largest)
        enough = waiting <= room or len(segments) == 1
        with nullcontext() if enough else temporary_directory("ampaudit-segments-") as directory:
            yield Parking(config.device, on_host, directory)

    def _call(self, key: Key, observer: Meter | RepairingMeter) -> BatchCall:
        number, policy = key
        return BatchCall(policy, self._ready[key], observer, self.runners[policy].config.seed + number)

    def _through(
        self, way: _Way, parking: Parking, run: str, calls: Iterable[BatchCall]
    ) -> Iterator[tuple[BatchCall, list[Pair]]]:
        """Run calls through the segments of this process; yield those that end, with their outputs."""
        passages = [Passage(f"{self.phase}-{run}-{name}", c, parking) for name, c in self._grouped(calls)]
        for segment in way.own:
            with way.holding(segment, passages):
                for place, passage in enumerate(passages):
                    self.progress(f"{self.phase}, segment {segment + 1} of {way.count}", place, len(passages))
                    self.at = passage.number
                    yield from self._pass(way, segment, passage)

    def _pass(self, way: _Way, segment: int, passage: Passage) -> Iterator[tuple[BatchCall, list[Pair]]]:
        started = time.perf_counter()
        passed = self._route.passed(passage.name) if self._route.keeps else 0
        ends = segment == way.count - 1
        if passed > segment and not (ends and passed == way.count):
            return  # an earlier process has done this
        if passed and passed >= segment and passage.fresh:
            passage.unpack(self._route.load(passage.name), passage.name)
        with telling_own_failures(self.model, passage.calls[0].ready.batch):
            found = passage.advance([way.end(call.ready.executor, segment) for call in passage.calls])
        if self._route.keeps and passed <= segment:
            self._route.save(passage.name, segment + 1, way.count, passage.pack)
        if found is None:
            passage.pause()
        self.runners[passage.calls[0].policy].record.add_seconds("run", time.perf_counter() - started)
        if found is not None:
            yield from zip(passage.calls, found, strict=True)

    def _grouped(self, calls: Iterable[BatchCall]) -> Iterator[tuple[str, list[BatchCall]]]:
        """Group the calls of a batch that can share one reference."""
        groups: dict[str, list[BatchCall]] = {}
        for call in calls:
            alone = self._route.keeps or call.draws
            name = f"{call.ready.number}-{call.policy}" if alone else f"{call.ready.number}"
            groups.setdefault(name, []).append(call)
        yield from groups.items()

    def _judge(self, call: BatchCall, outputs: list[Pair]) -> None:
        judged = self.runners[call.policy].judge(call.ready, outputs)
        self._judged[call.key] = judged
        self._keep_record(call.key)
        if not judged.needs_repair:
            self._conclude(call, [])

    def _conclude(self, call: BatchCall, outputs: list[Pair]) -> None:
        repairing = call.observer if isinstance(call.observer, RepairingMeter) else None
        self.runners[call.policy].conclude(self._judged[call.key], repairing, outputs)
        self._keep_record(call.key)
        self._ended.add(call.key)
        number, keys = call.ready.number, [(call.ready.number, p) for p in range(len(self.runners))]
        if self._ended.issuperset(keys):
            self.done[number] = [_joined(self._records.pop(key)) for key in keys]
            self.share.record(self.phase, number, self.done[number])

    def _broken(self) -> Again:
        found: dict[int, dict[int, frozenset[str]]] = {}
        for (number, policy), judged in self._judged.items():
            if judged.needs_repair:
                found.setdefault(number, {})[policy] = frozenset(judged.faults.masks)
        return found

    def _keep_record(self, key: Key) -> None:
        self._records.setdefault(key, []).append(self.runners[key[1]].end_batch())


class _Way:
    """The segments of a program, and where they end in the programs of other batches."""

    def __init__(self, segments: Sequence[Segment], program: Program, route: Route) -> None:
        self.count = len(segments)
        self.own = route.own(self.count)
        self._segments = segments
        self._ends = {id(program): [segment.end for segment in segments]}
        places = {place.node: place.name for place in program.traced.placeholders}
        self._first: dict[str, int] = {}
        for index, segment in enumerate(segments):
            for node in segment.weights:
                self._first.setdefault(places[node], index)

    def end(self, executor: LockStep, segment: int) -> int:
        """Return the group at which a segment ends."""
        program = executor.program
        if id(program) not in self._ends:
            self._ends[id(program)] = aligned_ends(program, self._segments, self._first)
        return self._ends[id(program)][segment]

    @contextmanager
    def holding(self, segment: int, passages: Iterable[Passage]) -> Iterator[None]:
        """Hold the weights of a segment, once for all programs."""
        executors = {id(c.ready.executor): c.ready.executor for p in passages for c in p.calls}
        pool: dict[int, torch.Tensor] = {}
        for executor in executors.values():
            start = self.end(executor, segment - 1) if segment else 0
            weights = executor.weight_reads[start : self.end(executor, segment)]
            executor.weights.hold(frozenset().union(*weights), pool)
        try:
            yield
        finally:
            for executor in executors.values():
                executor.weights.let_go()


def _joined(records: Sequence[RunRecord]) -> RunRecord:
    first, *others = records
    for other in others:
        first.join(other)
    return first
