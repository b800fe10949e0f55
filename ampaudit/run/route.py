"""Says which segments this process runs, and where the states between segments go."""

from __future__ import annotations

from collections.abc import Callable, Mapping

__all__ = ["HERE", "Again", "Route"]

Again = Mapping[int, Mapping[int, frozenset[str]]]


class Route:
    """The way of every batch through the segments; this one stays in this process.

    Attributes:
        keeps: whether states are to be saved after each segment.
    """

    keeps = False

    @property
    def ends(self) -> bool:
        """Whether batches end in this process, which then judges their runs."""
        return True

    def own(self, count: int) -> range:
        """Return the segments, of so many, that run in this process."""
        return range(count)

    def limit(self, memory: int) -> int:
        """Return the memory within which the program is cut."""
        return memory

    def stages(self) -> int:
        """Return how many processes the segments are divided among."""
        return 1

    def passed(self, call: str) -> int:
        """Return how many segments a call has passed before it comes here."""
        del call
        return 0

    def load(self, call: str) -> bytes:
        """Return the state of a call that has passed segments elsewhere, or earlier."""
        raise KeyError(call)

    def save(self, call: str, passed: int, count: int, pack: Callable[[], bytes]) -> None:
        """Keep the state of a call that has passed so many segments of all, or hand it on."""

    def agreed(self, phase: str, again: Again | None) -> Again:
        """Return, by batch and run, the masks of those that have to run again with repairs.

        Args:
            phase: of the audit.
            again: of what ended in this process; ``None`` if nothing did.
        """
        del phase
        return again or {}


HERE = Route()
