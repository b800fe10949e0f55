"""Runs all batches through one segment of the program at a time.

Each weight is held while all batches pass its segment, and then freed, so that it is moved, or read from
disk, once per run over all batches. Batches in which something breaks pass all segments again, with repairs.
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

from ampaudit.core.errors import AuditError, InputError, first_line
from ampaudit.core.files import temporary_directory, write_bytes
from ampaudit.core.session import Progress
from ampaudit.run.device import guarded, random_state, restore_random_state
from ampaudit.run.fp32_check import reporting_model_failures
from ampaudit.run.lockstep import GraphState, Interleaved, LockStep, Pair
from ampaudit.run.meter import MEASUREMENTS, Meter
from ampaudit.run.program import Program
from ampaudit.run.propagation import RepairingMeter
from ampaudit.run.record import RunRecord
from ampaudit.run.runner import BatchRun, Runner
from ampaudit.run.segments import Segment, aligned_ends, cut_evenly, cut_program, program_bytes
from ampaudit.run.share import Failure, PartRecords, RepairMasks, Share
from ampaudit.source.interface import Batch

State = dict[str, Any]
_UNPACK_ERRORS = (
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

    Returns:
        The records of all batches that ended in this process, and the first error.
    """
    earlier_records: dict[int, list[RunRecord]] = {}
    work, failure = _Segmented(model, runners, share, phase, progress), None
    try:
        for number, batch in enumerate(batches):
            progress(phase, number, len(batches))
            if (earlier := share.recorded(phase, number)) is not None:
                earlier_records[number] = earlier
            work.prepare(number, batch, mine=earlier is None and share.mine(phase, number))
        work.run()
    except AuditError as error:
        if len(batches) > 1:
            error.add_place(batches[work.at].title(work.at))
        if share.alone:
            raise
        failure = Failure.of(work.at, error)
    return PartRecords(earlier_records | work.done, failure)


@dataclass
class _Segmented:
    """The batches of one phase of an audit."""

    model: nn.Module
    runners: Sequence[Runner]
    share: Share
    phase: str
    progress: Progress
    at: int = 0  # number of the current batch
    # records under each policy of the batches that have ended
    done: dict[int, list[RunRecord]] = field(default_factory=dict)
    _ready: dict[Key, BatchRun] = field(default_factory=dict)
    _records: dict[Key, RunRecord] = field(default_factory=dict)
    _ended: set[Key] = field(default_factory=set)
    _programs: dict[int, tuple[int, Program]] = field(default_factory=dict)  # with the first batch of each

    def prepare(self, number: int, batch: Batch, *, mine: bool) -> None:
        """Trace a batch under every policy, and check its inputs if it is run here."""
        self.at = number
        with reporting_model_failures(self.model, batch):
            for policy, runner in enumerate(self.runners):
                if mine:
                    self._ready[number, policy] = ready = runner.prepare(batch, number)
                    executor = ready.executor
                    self._keep_record((number, policy))
                    if not self.share.ends_batches:
                        runner.pass_on(batch, number, executor)
                else:
                    executor = runner.skip(batch, number)
                    runner.end_batch()
                self._programs.setdefault(id(executor.program), (number, executor.program))

    def run(self) -> None:
        """Run all batches, and run those in which something breaks again with repairs."""
        if not self._ready:
            return
        # the largest of all batches, so that every process has the same segments, and all batches fit
        self.at, largest = max(self._programs.values(), key=lambda entry: program_bytes(entry[1]))
        memory, stages = self.runners[0].config.memory, self.share.stages()
        limit = None if memory is None else self.share.memory_limit(memory)
        segments = cut_program(largest, limit, len(self.runners))
        if len(segments) < stages:
            segments = cut_evenly(largest, stages)
        with self._parking(segments) as parking:
            table = _SegmentTable(segments, largest, self.share)
            meters = [BatchCall(policy, ready, ready.meter) for (_, policy), ready in self._ready.items()]
            for call, outputs in self._through(table, parking, "1", meters):
                faults = self.runners[call.policy].analyze(call.ready, outputs)
                self._keep_record(call.key)
                if not faults.need_repair:
                    self._conclude(call)
            again = self.share.agreed_repairs(self.phase, self._broken())
            repairing = [
                BatchCall(policy, ready, self.runners[policy].repairing(ready, again[number][policy]))
                for (number, policy), ready in self._ready.items()
                if policy in again.get(number, {})
            ]
            for call, _ in self._through(table, parking, "2", repairing):
                self._conclude(call)

    @contextmanager
    def _parking(self, segments: Sequence[Segment]) -> Iterator[Parking]:
        """Provide a place for boundaries: the host, or the disk if it is too small."""
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

    def _through(
        self, table: _SegmentTable, parking: Parking, run: str, calls: Iterable[BatchCall]
    ) -> Iterator[tuple[BatchCall, list[Pair]]]:
        """Run calls through the segments of this process; yield those that end, and their outputs."""
        passages = [Passage(f"{self.phase}-{run}-{name}", c, parking) for name, c in self._grouped(calls)]
        for segment in table.local:
            with table.holding(segment, passages):
                for place, passage in enumerate(passages):
                    self.progress(
                        f"{self.phase}, segment {segment + 1} of {table.count}", place, len(passages)
                    )
                    self.at = passage.number
                    self.share.check_others()
                    yield from self._pass(table, segment, passage)

    def _pass(
        self, table: _SegmentTable, segment: int, passage: Passage
    ) -> Iterator[tuple[BatchCall, list[Pair]]]:
        started = time.perf_counter()
        passed = self.share.segments_passed(passage.name)
        if passed > segment and segment < table.count - 1:
            return  # done by an earlier process
        if passed and passed >= segment and passage.fresh:
            passage.unpack(self.share.load_state(passage.name), passage.name)
        with reporting_model_failures(self.model, passage.calls[0].ready.batch):
            outputs = passage.advance([table.end(call.ready.executor, segment) for call in passage.calls])
        if self.share.keeps_states and passed <= segment:
            self.share.save_state(passage.name, segment + 1, table.count, passage.pack)
        if outputs is None:
            passage.pause()
        self.runners[passage.calls[0].policy].record.add_seconds("run", time.perf_counter() - started)
        if outputs is not None:
            yield from zip(passage.calls, outputs, strict=True)

    def _grouped(self, calls: Iterable[BatchCall]) -> Iterable[tuple[str, list[BatchCall]]]:
        """Group the calls of a batch that can share one reference."""
        groups: dict[str, list[BatchCall]] = {}
        for call in calls:
            alone = self.share.keeps_states or call.ready.executor.program.draws
            name = f"{call.ready.number}-{call.policy}" if alone else f"{call.ready.number}"
            groups.setdefault(name, []).append(call)
        return groups.items()

    def _conclude(self, call: BatchCall) -> None:
        repairing = call.observer if isinstance(call.observer, RepairingMeter) else None
        self.runners[call.policy].conclude(call.ready, repairing)
        self._keep_record(call.key)
        self._ended.add(call.key)
        number, keys = call.ready.number, [(call.ready.number, p) for p in range(len(self.runners))]
        if self._ended.issuperset(keys):
            self.done[number] = [self._records.pop(key) for key in keys]
            self.share.record(self.phase, number, self.done[number])

    def _broken(self) -> RepairMasks:
        broken: dict[int, dict[int, frozenset[str]]] = {}
        for (number, policy), ready in self._ready.items():
            if ready.faults is not None and ready.faults.need_repair:
                broken.setdefault(number, {})[policy] = frozenset(ready.faults.masks)
        return broken

    def _keep_record(self, key: Key) -> None:
        record = self.runners[key[1]].end_batch()
        if key in self._records:
            self._records[key].join(record)
        else:
            self._records[key] = record


class _SegmentTable:
    """The segments of a program, and where they end in the programs of other batches."""

    def __init__(self, segments: Sequence[Segment], program: Program, share: Share) -> None:
        self.count = len(segments)
        self.local = share.local_segments(self.count)
        self._segments = segments
        self._ends = {id(program): [segment.end for segment in segments]}
        places = {place.node: place.name for place in program.traced.placeholders}
        self._first: dict[str, int] = {}
        for index, segment in enumerate(segments):
            for node in segment.weights:
                self._first.setdefault(places[node], index)

    def end(self, executor: LockStep, segment: int) -> int:
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


@dataclass(frozen=True, slots=True)
class BatchCall:
    """One run of one batch under one policy, identified by its index."""

    policy: int
    ready: BatchRun
    observer: Meter | RepairingMeter

    @property
    def key(self) -> tuple[int, int]:
        """The numbers of the batch and of the policy."""
        return self.ready.number, self.policy


@dataclass(frozen=True, slots=True)
class Parking:
    """A place for values between segments: the device, the host, or, with a directory, the disk."""

    device: torch.device
    on_host: bool = False
    directory: Path | None = None

    def park(self, name: str, state: GraphState) -> None:
        """Move the values of a state to this place."""
        if self.directory is not None:
            write_bytes(self.directory / name, pack_state(state, {}), force=True)
            state.values.clear()
        elif self.on_host:
            moved_to(state, CPU)

    def fetch(self, name: str, state: GraphState, call: BatchCall) -> None:
        """Move the values of a state back to the device."""
        if self.directory is not None:
            path = self.directory / name
            stored, _ = unpack_state(path.read_bytes(), call.ready.executor.program, self.device, name)
            state.values.update(stored.values)
            state.buffers.update(stored.buffers)
        elif self.on_host:
            moved_to(state, self.device)


class Passage:
    """The runs of one batch through the segments; several run side by side and share one reference."""

    def __init__(self, name: str, calls: Sequence[BatchCall], parking: Parking) -> None:
        self.name = name
        self.number = calls[0].ready.number
        self.calls = tuple(calls)
        self._parking = parking
        self._states: list[GraphState] = []
        self._runs: Interleaved | None = None
        self._drawn: torch.Tensor | None = None
        self._draws = any(call.ready.executor.program.draws for call in calls)

    @property
    def fresh(self) -> bool:
        """Whether it has not begun in this process."""
        return self._runs is None

    def advance(self, ends: Sequence[int]) -> list[list[Pair]] | None:
        """Run each call up to a group of its program; return the outputs once all calls have ended.

        Otherwise, the caller may pack the state, and must call ``pause``.

        ``ends`` are the groups at which to stop.
        """
        device = self._parking.device
        with guarded(device, self.calls[0].ready.batch), torch.no_grad():
            if self._runs is None:
                torch.manual_seed(self.calls[0].ready.seed)
                self._enter([c.ready.executor.start(c.ready.tensors, c.ready.carried) for c in self.calls])
            else:
                for index, (state, call) in enumerate(zip(self._states, self.calls, strict=True)):
                    self._parking.fetch(f"{self.name}.{index}", state, call)
            if self._drawn is not None:
                restore_random_state(self._drawn, device)
            assert self._runs is not None
            outputs = self._runs.advance(lambda index: self._states[index].group >= ends[index])
            self._drawn = random_state(device) if self._draws else None
        if outputs is None:
            for state, call in zip(self._states, self.calls, strict=True):
                if isinstance(call.observer, RepairingMeter):
                    call.observer.forget(state.values)
        return outputs

    def pause(self) -> None:
        """Park the values until the next segment; they cannot be packed meanwhile."""
        for index, state in enumerate(self._states):
            self._parking.park(f"{self.name}.{index}", state)

    def pack(self) -> bytes:
        """Return the state of a single call as bytes, for another process or a later run."""
        ((call, state),) = zip(self.calls, self._states, strict=True)
        return pack_state(state, {"observer": call.observer.state(), "drawn": self._drawn})

    def unpack(self, data: bytes, name: str) -> None:
        """Continue a single call from the state that another process packed.

        Raises:
            InputError: The bytes are not a state of this call.
        """
        (call,) = self.calls
        state, more = unpack_state(data, call.ready.executor.program, self._parking.device, name)
        try:
            call.observer.restore(more["observer"])
            self._drawn = None if more["drawn"] is None else more["drawn"].cpu()
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise InputError(
                f"{name} is not a state of this audit: {error}", hint="remove it, and start again"
            ) from None
        self._enter([state])
        self.pause()

    def _enter(self, states: list[GraphState]) -> None:
        self._states = states
        pairs = zip(self.calls, states, strict=True)
        self._runs = Interleaved([(call.ready.executor, state, call.observer) for call, state in pairs])


def moved_to(state: GraphState, device: torch.device) -> None:
    """Move values to a device, preserving strides and shared memory."""
    values, buffers = _from_views(*_to_views(state), device)
    state.values.update(values)
    state.buffers.update(buffers)


def _bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


class _View(NamedTuple):
    """How a tensor views a storage, given by its index; views of one storage may differ in dtype."""

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
            ValueError: The view exceeds the storage.
        """
        last = self.offset + sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        ends = (last + 1) * self.dtype.itemsize if 0 not in self.shape else 0
        if min(self.offset, *self.shape, *self.strides, 0) < 0 or ends > storage.nbytes():
            raise ValueError("a tensor beyond its memory")
        tensor = torch.empty(0, dtype=self.dtype, device=storage.device)
        tensor = tensor.set_(storage, self.offset, self.shape, self.strides)
        tensor = tensor.conj() if self.is_conj else tensor
        return torch.ops.aten._neg_view(tensor) if self.is_neg else tensor


def _to_views(state: GraphState) -> tuple[list[Any], list[torch.Tensor]]:
    """Return both tables of a state with views in place of tensors, and the bytes of their storages."""
    storages: dict[int, tuple[int, torch.Tensor]] = {}
    views: dict[int, _View] = {}  # one tensor in two places stays one

    def view_of(tensor: torch.Tensor) -> torch.Tensor | _View:
        if tensor.layout is not torch.strided or tensor.is_quantized:
            return tensor
        storage = tensor.untyped_storage()
        index, _ = storages.setdefault(storage._cdata, (len(storages), _bytes_of(storage)))
        return views.setdefault(id(tensor), _View.of(tensor, index))

    tables = [pytree.tree_map_only(torch.Tensor, view_of, table) for table in (state.values, state.buffers)]
    return tables, [content for _, content in storages.values()]


def _from_views(tables: list[Any], contents: list[torch.Tensor], device: torch.device) -> Any:
    """Return tables with tensors on a device in place of views.

    Raises:
        ValueError: A view exceeds its storage.
    """
    storages = [content.to(device).untyped_storage() for content in contents]
    tensors: dict[int, torch.Tensor] = {}

    def tensor_of(leaf: Any) -> Any:
        if not isinstance(leaf, torch.Tensor | _View):
            return leaf
        if id(leaf) not in tensors:
            tensors[id(leaf)] = (
                leaf.on(storages[leaf.storage]) if isinstance(leaf, _View) else leaf.to(device)
            )
        return tensors[id(leaf)]

    return pytree.tree_map(tensor_of, tables, is_leaf=lambda item: isinstance(item, _View))


def pack_state(state: GraphState, more: State) -> bytes:
    """Return a state, with plain data and measurements, as bytes; shared memory is preserved."""
    tables, contents = _to_views(state)
    named = [{node.name: pair for node, pair in table.items()} for table in tables]
    file = io.BytesIO()
    torch.save({"storages": contents, "tables": named, "group": state.group, "more": more}, file)
    return file.getvalue()


def unpack_state(data: bytes, program: Program, device: torch.device, name: str) -> tuple[GraphState, State]:
    """Return a state and its additional data from bytes, without executing any code in them.

    Raises:
        InputError: The bytes, called ``name``, are not a state of this program.
    """
    nodes: dict[str, fx.Node] = {node.name: node for node in program.traced.graph.nodes}
    try:
        with torch.serialization.safe_globals([_View, *MEASUREMENTS]):
            contents = torch.load(io.BytesIO(data), map_location=device, weights_only=True)
        values, buffers = (
            {nodes[key]: tuple(pair) for key, pair in table.items()}
            for table in _from_views(contents["tables"], contents["storages"], device)
        )
        group, more = contents["group"], contents["more"]
        if not (isinstance(group, int) and 0 <= group <= len(program.groups) and isinstance(more, dict)):
            raise ValueError("another program's")
        if any(len(pair) != 2 for pair in (*values.values(), *buffers.values())):
            raise ValueError("not pairs")
    except _UNPACK_ERRORS as error:
        raise InputError(
            f"{name} is not a state of this audit: {first_line(error)}", hint="remove it, and start again"
        ) from None
    return GraphState(values, buffers, group), more
