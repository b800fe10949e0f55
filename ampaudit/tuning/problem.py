"""The optimization problem of ``tune``: which ops and weights to keep in float32, with costs and errors."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ampaudit.run.sensitivity.precision_graph import PrecisionGraph, ValueKind
from ampaudit.run.sensitivity.probe import Sensitivities

__all__ = ["Choice", "Prices", "TuningProblem"]

Choice = frozenset[str]  # names of ops and weights in float32
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Prices:
    """Costs by name of value: of holding it in float32, and of casting it in one direction."""

    values: Mapping[str, float]
    casts: Mapping[str, float]

    def counting(self, graph: PrecisionGraph) -> Prices:
        """Return prices that count the ops in float32."""
        ops = (name for name, value in graph.values.items() if value.kind is ValueKind.OP)
        return Prices({name: 1.0 for name in ops if self.values.get(name)}, {})


@dataclass(frozen=True)
class TuningProblem:
    """Minimize the cost of float32 such that no column's predicted error exceeds a budget.

    Attributes:
        graph: Values and their readers.
        sensitivities: Error that each rounding adds, relative to the squares of the outputs.
        prices: Costs of float32 and of casts.
        pinned: Ops and weights whose values 16 bits cannot represent.
        wide_reads: Values that 16 bits cannot represent; their readers must take them in float32.
    """

    graph: PrecisionGraph
    sensitivities: Sensitivities
    prices: Prices
    pinned: Choice = frozenset()
    wide_reads: frozenset[str] = frozenset()

    @cached_property
    def free(self) -> tuple[str, ...]:
        """The ops and weights to choose, in graph order."""
        return tuple(name for name, value in self.graph.values.items() if value.free)

    @cached_property
    def required(self) -> Choice:
        """Members of every choice: pinned ones, and readers of values that 16 bits cannot represent."""
        values = self.graph.values
        readers = {n for n, sources in self.graph.reads.items() if not self.wide_reads.isdisjoint(sources)}
        return frozenset(
            n for n in (*self.pinned, *readers, *self.wide_reads) if n in values and values[n].free
        )

    @cached_property
    def _arrays(self) -> tuple[dict[str, int], Numbers, Numbers, Numbers, Numbers]:
        index = {name: number for number, name in enumerate(self.graph.values)}
        columns = len(self.sensitivities.columns)
        value_rows = np.zeros((len(index), columns))
        for name, row in self.sensitivities.own.items():
            value_rows[index[name]] = row
        pairs = list(self.sensitivities.reads.items())
        source = np.array([index[a] for (a, _), _ in pairs], dtype=int)
        reader = np.array([index[b] for (_, b), _ in pairs], dtype=int)
        read_rows = np.array([row for _, row in pairs]).reshape(len(pairs), columns)
        return index, value_rows, source, reader, read_rows

    def noise(self, choice: Collection[str]) -> float:
        """Return the predicted relative squared error of the worst column."""
        return float(self.noises(choice).max(initial=0.0))

    def noises(self, choice: Collection[str]) -> Numbers:
        """Return the predicted relative squared error of each column."""
        index, value_rows, source, reader, read_rows = self._arrays
        wide = np.zeros(len(index), dtype=bool)
        wide[[index[name] for name in self.graph.in_float32(choice)]] = True
        total: Numbers = value_rows[~wide].sum(axis=0) + read_rows[wide[source] & ~wide[reader]].sum(axis=0)
        return total

    def reduced(self, choice: Choice, dropped: Collection[str]) -> Choice:
        """Return a choice without some members, and without weights that only 16-bit ops then read.

        A 16-bit op rounds its weights, in whatever format they are stored.
        """
        remaining = choice.difference(dropped)
        wide = self.graph.in_float32(remaining)
        read = self.required.union(source.name for source, user in self.graph.readers() if user.name in wide)
        values = self.graph.values
        return frozenset(n for n in remaining if values[n].kind is not ValueKind.WEIGHT or n in read)

    def cost(self, choice: Collection[str]) -> float:
        """Return the cost of a choice: of its values in float32, and of the casts at its borders."""
        wide = self.graph.in_float32(choice)
        casts = (self.prices.casts.get(name, 0.0) for name, _ in self.borders(wide))
        # fsum is exact, whatever the order of the set
        return math.fsum((*(self.prices.values.get(name, 0.0) for name in wide), *casts))

    def borders(self, wide: Collection[str]) -> Sequence[tuple[str, bool]]:
        """Return the values that are cast, each once per direction, and whether the cast is to float32."""
        casts: dict[tuple[str, bool], None] = {}
        for source, reader in self.graph.readers():
            differ = (source.name in wide) != (reader.name in wide)
            if differ and source.kind is not ValueKind.WEIGHT and reader.kind is not ValueKind.FOLLOW:
                casts[source.name, reader.name in wide] = None
        return list(casts)

    def ops(self, choice: Collection[str]) -> tuple[str, ...]:
        """Return the ops of a choice, in graph order."""
        values = self.graph.values
        return tuple(n for n in values if n in choice and values[n].kind is ValueKind.OP)
