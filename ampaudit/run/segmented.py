"""Runs all batches through one segment of the program at a time.

Every weight is held while all batches pass its segment, and then freed, so that it is moved, or read from
disk, once for a run over all batches. Batches in which something breaks pass all segments once more, with
repairs.
"""

from __future__ import annotations

import io
import pickle
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import psutil
import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from ampaudit.core.config import Progress
from ampaudit.core.errors import AuditError, InputError, first_line
from ampaudit.core.files import temporary_directory, write_bytes
from ampaudit.run.device import random_state, restore_random_state
from ampaudit.run.eager import telling_own_failures
from ampaudit.run.guards import guarded
from ampaudit.run.lockstep import GraphState, LockStep
from ampaudit.run.meter import Meter
from ampaudit.run.observer import Pair
from ampaudit.run.prepared import Judged, PreparedBatch
from ampaudit.run.program import Program
from ampaudit.run.record import RunRecord
from ampaudit.run.repair import RepairingMeter
from ampaudit.run.runner import Runner
from ampaudit.run.segments import Segment, aligned_ends, cut_evenly, cut_program
from ampaudit.run.share import Again, Failure, PartRecords, Route, Share
from ampaudit.run.sharing import Interleaved, SharedReference
from ampaudit.source.interface import Batch

__all__ = ["moved_to", "pack_state", "run_segmented", "unpack_state"]

State = dict[str, Any]
_MISFITS = (
    *(pickle.UnpicklingError, EOFError, RuntimeError),
    *(ValueError, KeyError, TypeError, AttributeError, IndexError),
)
CPU = torch.device("cpu")
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


@dataclass(frozen=True, slots=True)
class BatchCall:
    """One run of one batch under one policy.

    Attributes:
        policy: its number.
        ready: the batch.
        observer: of the run.
        seed: of its random numbers.
    """

    policy: int
    ready: PreparedBatch
    observer: Meter | RepairingMeter
    seed: int

    @property
    def key(self) -> tuple[int, int]:
        """The numbers of the batch and of the policy."""
        return self.ready.number, self.policy

    @property
    def draws(self) -> bool:
        """Whether it draws random numbers."""
        return any(step.random for step in self.ready.executor.program.steps)


@dataclass(frozen=True, slots=True)
class Parking:
    """Where values wait: on the device, on the host, or, with a directory, on disk."""

    device: torch.device
    on_host: bool = False
    directory: Path | None = None

    def park(self, name: str, state: GraphState) -> None:
        """Move the values of a state there."""
        if self.directory is not None:
            write_bytes(self.directory / name, pack_state(state, {}), force=True)
            state.values.clear()
        elif self.on_host:
            moved_to(state, CPU)

    def fetch(self, name: str, state: GraphState, call: BatchCall) -> None:
        """Move them back."""
        if self.directory is not None:
            path = self.directory / name
            found, _ = unpack_state(path.read_bytes(), call.ready.executor.program, self.device, name)
            state.values.update(found.values)
            state.buffers.update(found.buffers)
        elif self.on_host:
            moved_to(state, self.device)


class Passage:
    """The runs of one batch on their way; several share one reference and go side by side.

    Args:
        name: of the calls, unique among all.
        calls: one for each policy, or only one.
        parking: where values wait between segments.
    """

    def __init__(self, name: str, calls: Sequence[BatchCall], parking: Parking) -> None:
        self.name = name
        self.number = calls[0].ready.number
        self.calls = tuple(calls)
        self._parking = parking
        self._states: list[GraphState] = []
        self._runs: Interleaved | None = None
        self._drawn: torch.Tensor | None = None
        self._draws = any(call.draws for call in calls)

    @property
    def fresh(self) -> bool:
        """Whether it has not begun in this process."""
        return self._runs is None

    def advance(self, ends: Sequence[int]) -> list[list[Pair]] | None:
        """Run to a group of each call's program; return the outputs of all at the end of all.

        Without outputs, the caller may pack the state, and lets it pause.

        Args:
            ends: for each call, the group at which to stop.
        """
        device = self._parking.device
        with guarded(device, self.calls[0].ready.batch), torch.no_grad():
            if self._runs is None:
                torch.manual_seed(self.calls[0].seed)
                self._enter([c.ready.executor.start(c.ready.tensors, c.ready.own) for c in self.calls])
            else:
                for index, (state, call) in enumerate(zip(self._states, self.calls, strict=True)):
                    self._parking.fetch(f"{self.name}.{index}", state, call)
            if self._drawn is not None:
                restore_random_state(self._drawn, device)
            assert self._runs is not None
            found = self._runs.advance(lambda index: self._states[index].group >= ends[index])
            self._drawn = random_state(device) if self._draws else None
        if found is None:
            for state, call in zip(self._states, self.calls, strict=True):
                if isinstance(call.observer, RepairingMeter):
                    call.observer.forget(state.values)
        return found

    def pause(self) -> None:
        """Let the values wait until the next segment; they cannot be packed meanwhile."""
        for index, state in enumerate(self._states):
            self._parking.park(f"{self.name}.{index}", state)

    def pack(self) -> bytes:
        """Return the state of a single call, for another process or a later one."""
        ((call, state),) = zip(self.calls, self._states, strict=True)
        return pack_state(state, {"observer": call.observer.state(), "drawn": self._drawn})

    def unpack(self, data: bytes, name: str) -> None:
        """Go on where another process was with a single call.

        Raises:
            InputError: the bytes are no state of it.
        """
        (call,) = self.calls
        program = call.ready.executor.program
        state, more = unpack_state(data, program, self._parking.device, name)
        try:
            if isinstance(call.observer, Meter):
                call.observer.restore(more["observer"])
            else:
                call.observer.restore(more["observer"], program.traced.graph)
            self._drawn = None if more["drawn"] is None else more["drawn"].cpu()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{name} is not a state of this audit: {error}", hint="remove it, and start again"
            ) from None
        self._enter([state])
        self.pause()

    def _enter(self, states: list[GraphState]) -> None:
        self._states = states
        executors = [call.ready.executor for call in self.calls]
        several = len(executors) > 1
        shared = SharedReference([executor.program for executor in executors]) if several else None
        runs = zip(executors, states, self.calls, strict=True)
        self._runs = Interleaved([e.proceed(state, call.observer, shared) for e, state, call in runs], shared)


def moved_to(state: GraphState, device: torch.device) -> None:
    """Move values to a device, with their strides; those that share memory still do afterwards."""
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]] = {}
    made: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def change(tensor: torch.Tensor) -> torch.Tensor:
        if id(tensor) not in made:
            made[id(tensor)] = tensor, _moved(tensor, device, moved)
        return made[id(tensor)][1]

    for table in (state.values, state.buffers):
        for node, pair in table.items():
            table[node] = pytree.tree_map_only(torch.Tensor, change, pair)


def _moved(
    tensor: torch.Tensor,
    device: torch.device,
    moved: dict[int, tuple[torch.UntypedStorage, torch.UntypedStorage]],
) -> torch.Tensor:
    if not _is_view_of_bytes(tensor):
        return tensor.to(device)
    storage = tensor.untyped_storage()
    if storage._cdata not in moved:
        moved[storage._cdata] = storage, _bytes_of(storage).to(device).untyped_storage()
    return _View.of(tensor, 0).on(moved[storage._cdata][1])


def _is_view_of_bytes(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_quantized


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _View(NamedTuple):
    """How a tensor reads a storage, the ``storage``-th of several; dtypes of one storage may differ."""

    storage: int
    dtype: torch.dtype
    offset: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    is_conj: bool
    is_neg: bool

    @classmethod
    def of(cls, tensor: torch.Tensor, storage: int) -> _View:
        shape, strides = tuple(tensor.shape), tensor.stride()
        flags = (tensor.is_conj(), tensor.is_neg())
        return cls(storage, tensor.dtype, int(tensor.storage_offset()), shape, strides, *flags)

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        """Return the tensor.

        Raises:
            ValueError: it would read beyond the storage.
        """
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        ends = (last + 1) * self.dtype.itemsize if 0 not in self.shape else 0
        if min(self.offset, *self.shape, *self.strides, 0) < 0 or ends > storage.nbytes():
            raise ValueError("a tensor beyond its memory")
        made = torch.empty(0, dtype=self.dtype, device=storage.device)
        made = made.set_(storage, self.offset, self.shape, self.strides)
        made = made.conj() if self.is_conj else made
        return torch.ops.aten._neg_view(made) if self.is_neg else made


def pack_state(state: GraphState, more: State) -> bytes:
    """Return a state as bytes, with more plain data; values that share memory still do afterwards."""
    storages: dict[int, tuple[int, torch.Tensor]] = {}
    made: dict[int, tuple[str, tuple[Any, ...]]] = {}  # one tensor in two places stays one

    def change(tensor: torch.Tensor) -> torch.Tensor | tuple[str, tuple[Any, ...]]:
        if not _is_view_of_bytes(tensor):
            return tensor
        storage = tensor.untyped_storage()
        index, _ = storages.setdefault(storage._cdata, (len(storages), _bytes_of(storage)))
        return made.setdefault(id(tensor), (_VIEW, tuple(_View.of(tensor, index))))

    tables = [
        {node.name: pytree.tree_map_only(torch.Tensor, change, pair) for node, pair in table.items()}
        for table in (state.values, state.buffers)
    ]
    contents = [content for _, content in storages.values()]
    file = io.BytesIO()
    torch.save({"storages": contents, "tables": tables, "group": state.group, "more": more}, file)
    return file.getvalue()


_VIEW = "view of a storage"


def unpack_state(data: bytes, program: Program, device: torch.device, name: str) -> tuple[GraphState, State]:
    """Return a state from bytes, and what was put with it; nothing in the bytes is ever run.

    Raises:
        InputError: they are no state of this program; errors call them ``name``.
    """
    nodes: dict[str, fx.Node] = {node.name: node for node in program.traced.graph.nodes}
    try:
        found = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        made: dict[int, torch.Tensor] = {}
        storages = [content.untyped_storage() for content in found["storages"]]
        values, buffers = (
            {nodes[key]: tuple(_unpacked(pair, storages, made)) for key, pair in table.items()}
            for table in found["tables"]
        )
        group, more = found["group"], found["more"]
        if not (isinstance(group, int) and 0 <= group <= len(program.groups) and isinstance(more, dict)):
            raise ValueError("another program's")
        if any(len(pair) != 2 for pair in (*values.values(), *buffers.values())):
            raise ValueError("not pairs")
    except _MISFITS as error:
        raise InputError(
            f"{name} is not a state of this audit: {first_line(error)}", hint="remove it, and start again"
        ) from None
    return GraphState(values, buffers, group), more


def _unpacked(value: Any, storages: Sequence[torch.UntypedStorage], made: dict[int, torch.Tensor]) -> Any:
    """Return a value with its tensors in the place of how they read the storages."""
    if isinstance(value, tuple) and len(value) == 2 and value[0] == _VIEW:
        if id(value) not in made:
            view = _View(*value[1])
            made[id(value)] = view.on(storages[view.storage])
        return made[id(value)]
    if isinstance(value, dict):
        return {key: _unpacked(item, storages, made) for key, item in value.items()}
    return (
        type(value)(_unpacked(item, storages, made) for item in value)
        if isinstance(value, list | tuple)
        else value
    )
