"""States what is to be chosen: which ops and weights are in float32, at what cost, with what error."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from ampaudit.run.sensitivity.precision_graph import PrecisionGraph, ValueKind
from ampaudit.run.sensitivity.probe import Sensitivities

__all__ = ["Chosen", "Prices", "TuningProblem"]

Chosen = frozenset[str]  # names of ops and weights in float32
Numbers = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True)
class Prices:
    """What float32 costs, by name: of values in float32, and of casting a value in one direction."""

    values: Mapping[str, float]
    casts: Mapping[str, float]

    def counting(self, graph: PrecisionGraph) -> Prices:
        """Return prices under which the cost is the number of ops in float32."""
        ops = (name for name, value in graph.values.items() if value.kind is ValueKind.OP)
        return Prices({name: 1.0 for name in ops if self.values.get(name)}, {})


@dataclass(frozen=True)
class TuningProblem:
    """Minimize the cost of float32, so that no column's predicted error exceeds a budget.

    Attributes:
        graph: the values and their readers.
        sensitivities: what each rounding adds to the error, relative to the squares of the outputs.
        prices: of float32 and of casts.
        pinned: ops and weights that must be in float32: 16 bits cannot hold their values.
        wide_reads: values that 16 bits cannot hold, so that their readers must take them in float32.
    """

    graph: PrecisionGraph
    sensitivities: Sensitivities
    prices: Prices
    pinned: Chosen = frozenset()
    wide_reads: frozenset[str] = frozenset()

    @cached_property
    def free(self) -> tuple[str, ...]:
        """The ops and weights to choose, in graph order."""
        return tuple(name for name, value in self.graph.values.items() if value.free)

    @cached_property
    def required(self) -> Chosen:
        """What every choice contains: what is pinned, and the readers of values that 16 bits cannot hold."""
        values = self.graph.values
        readers = {n for n, made in self.graph.reads.items() if not self.wide_reads.isdisjoint(made)}
        return frozenset(
            n for n in (*self.pinned, *readers, *self.wide_reads) if n in values and values[n].free
        )

    @cached_property
    def _arrays(self) -> tuple[dict[str, int], Numbers, Numbers, Numbers, Numbers]:
        index = {name: number for number, name in enumerate(self.graph.values)}
        columns = len(self.sensitivities.columns)
        own = np.zeros((len(index), columns))
        for name, row in self.sensitivities.own.items():
            own[index[name]] = row
        pairs = list(self.sensitivities.reads.items())
        made = np.array([index[a] for (a, _), _ in pairs], dtype=int)
        reader = np.array([index[b] for (_, b), _ in pairs], dtype=int)
        rows = np.array([row for _, row in pairs]).reshape(len(pairs), columns)
        return index, own, made, reader, rows

    def noise(self, chosen: Collection[str]) -> float:
        """Return the predicted relative squared error of the worst column."""
        return float(self.noises(chosen).max(initial=0.0))

    def noises(self, chosen: Collection[str]) -> Numbers:
        """Return the predicted relative squared error of each column."""
        index, own, made, reader, rows = self._arrays
        wide = np.zeros(len(index), dtype=bool)
        wide[[index[name] for name in self.graph.in_float32(chosen)]] = True
        total: Numbers = own[~wide].sum(axis=0) + rows[wide[made] & ~wide[reader]].sum(axis=0)
        return total

    def reduced(self, chosen: Chosen, dropped: Collection[str]) -> Chosen:
        """Return a choice without some members, and without the weights that no op in float32 reads then.

        An op in 16 bits rounds such a weight all the same.
        """
        left = chosen.difference(dropped)
        wide = self.graph.in_float32(left)
        read = self.required.union(made.name for made, reader in self.graph.readers() if reader.name in wide)
        values = self.graph.values
        return frozenset(name for name in left if values[name].kind is not ValueKind.WEIGHT or name in read)

    def cost(self, chosen: Collection[str]) -> float:
        """Return what a choice costs: its values in float32, and the casts at its borders."""
        wide = self.graph.in_float32(chosen)
        casts = (self.prices.casts.get(name, 0.0) for name, _ in self.borders(wide))
        # exact: the order of a set differs from run to run
        return math.fsum((*(self.prices.values.get(name, 0.0) for name in wide), *casts))

    def borders(self, wide: Collection[str]) -> Sequence[tuple[str, bool]]:
        """Return the values that are cast, and whether to float32; each once per direction."""
        found: dict[tuple[str, bool], None] = {}
        for made, reader in self.graph.readers():
            cast = (made.name in wide) != (reader.name in wide)
            if cast and made.kind is not ValueKind.WEIGHT and reader.kind is not ValueKind.FOLLOW:
                found[made.name, reader.name in wide] = None
        return list(found)

    def ops(self, chosen: Collection[str]) -> tuple[str, ...]:
        """Return the ops of a choice, in graph order."""
        values = self.graph.values
        return tuple(n for n in values if n in chosen and values[n].kind is ValueKind.OP)
