"""Takes one batch through the segments of a program, and keeps what is alive in between."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from ampaudit.core.errors import InputError
from ampaudit.core.files import write_bytes
from ampaudit.run.boundary import moved_to, pack_state, unpack_state
from ampaudit.run.device import random_state, restore_random_state
from ampaudit.run.guards import guarded
from ampaudit.run.lockstep import GraphState
from ampaudit.run.meter import Meter
from ampaudit.run.observer import Pair
from ampaudit.run.prepared import PreparedBatch
from ampaudit.run.repair import RepairingMeter
from ampaudit.run.sharing import Interleaved, SharedReference

__all__ = ["BatchCall", "Parking", "Passage"]

CPU = torch.device("cpu")


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
