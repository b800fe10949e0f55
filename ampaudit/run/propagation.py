"""Follows faults through an unrepaired run: harmless masks, and the sites that each origin poisons."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Set

from torch import fx

from ampaudit.core.decibels import signal_to_noise_db
from ampaudit.core.sites import SiteId
from ampaudit.run.meter import MeasuredValue
from ampaudit.run.program import Program
from ampaudit.run.record import Fate, Origin
from ampaudit.run.step import Step
from ampaudit.trace.graph import Slot

__all__ = ["FaultPropagation"]

# ops through which an additive mask reaches its softmax
_MASKING = ("add", "where", "masked_fill", "mul", "sub", "full", "to", "_to_copy", "full_like", "minimum")
_FILLING = ("masked_fill", "where", "full", "full_like", "fill")


class FaultPropagation:
    """The wrong sites of one unrepaired batch, and the paths between them.

    A view is wrong where its source is. ``masks`` are sites whose only fault is -inf in a value that is, or
    includes, a mask (independent of parameters, at the bottom of the format's range), if every path from
    there ends in finite values: a softmax turned them into zeros. ``by_design`` are sites near the limit
    because of a mask, whether or not anything is wrong there.
    """

    def __init__(
        self,
        program: Program,
        measured: Iterable[MeasuredValue],
        limit: float,
        placeholder_peak: Callable[[fx.Node], float],
    ) -> None:
        self._program = program
        self._limit = limit
        self._placeholder_peak = placeholder_peak
        self._rows: dict[SiteId, MeasuredValue] = {}
        self._peaks: dict[SiteId, float] = {}
        self._energies: dict[SiteId, tuple[float, float]] = {}
        bad: set[tuple[SiteId, int | None]] = set()
        stored = {
            p.node: p.name for p in program.traced.placeholders if p.slot in (Slot.BUFFER, Slot.CONSTANT)
        }
        self._buffers = {node: stored[node.name] for node in program.inputs if node.name in stored}
        for row in measured:
            signal, error = self._energies.get(row.site, (0.0, 0.0))
            self._energies[row.site] = (signal + row.fields["ref_sq"], error + row.fields["err_sq"])
            self._peaks[row.site] = max(self._peaks.get(row.site, 0.0), row.fields["ref_peak"])
            if row.bad and row.site not in self._rows:
                self._rows[row.site] = row
            if row.bad:
                bad.add((row.site, row.updated))
        self._steps = {step.node: step for step in program.steps}
        # wrong results, and wrong arguments that were written
        at = {step.site.id: step.node for step in program.steps if step.site is not None}
        self._parts = {(at[site], position) for site, position in bad}
        self._takers = self._mask_takers()
        self._wrong = self._wrong_nodes()
        self.masks = {step.site.id for step in self._wrong_steps() if step.site and self._is_mask(step)}
        self.by_design = {
            step.site.id
            for step in program.steps
            if step.site and self._peaks.get(step.site.id, 0.0) >= limit / 4 and step.node in self._takers
        }

    @property
    def need_repair(self) -> bool:
        """Whether anything besides harmless masks is wrong."""
        return any(not self._harmless(step) for step in self._wrong_steps())

    def origin(self, site: SiteId, batch: int, origins: Container[SiteId]) -> Origin:
        """Describe an origin of a batch: the sites that it poisons, and whether an output shows it."""
        start = next(s.node for s in self._program.steps if s.site and s.site.id == site)
        reached = _downstream(start, self._wrong)
        if again := self._broken_again(origins):
            for node in again & _downstream(start):
                reached |= _downstream(node, self._wrong)
        in_output = any(node in reached for node in self._program.outputs)
        poisons = tuple(
            step.site.id
            for step in self._program.steps
            if step.site and step.node in reached and step.node is not start and step.makes_values
        )
        hiding = [
            step.site.id
            for step in self._program.steps
            if step.site
            and step.node not in reached
            and step.makes_values
            and step.site.id in self._energies
            and any(node in reached for node in step.node.all_input_nodes)
        ]
        buffer = self._buffer(start)
        fate: Fate = "reaches the output" if in_output or not hiding or buffer else "recovered"
        energies = [self._energies[hidden] for hidden in hiding]
        # without error a site is exact, without signal nothing of it is left
        sqnr = [signal_to_noise_db(*pair) if pair[0] else 0.0 for pair in energies if pair[1]]
        worst = min((db for db in sqnr if db is not None), default=None)
        return Origin(site, batch, poisons, fate, tuple(hiding), worst, buffer)

    def _buffer(self, node: fx.Node) -> str | None:
        """Return the buffer to which a broken step wrote a broken value, if any."""
        step = self._steps[node]
        updated = {position for position, _ in step.updates}
        for position in step.mutates:
            target = node.args[position] if position < len(node.args) else None
            while isinstance(target, fx.Node) and target not in self._buffers and target.all_input_nodes:
                target = target.all_input_nodes[0]  # the views and writes before
            wrong = (node, position if position in updated else None) in self._parts
            if wrong and isinstance(target, fx.Node) and target in self._buffers:
                return self._buffers[target]
        return None

    def _wrong_nodes(self) -> set[fx.Node]:
        wrong: set[fx.Node] = set()
        for step in self._program.steps:
            if not step.makes_values:
                if any(source in wrong for source in step.node.all_input_nodes):
                    wrong.add(step.node)
            elif step.site is not None and step.site.id in self._rows:
                wrong.add(step.node)
        return wrong

    def _wrong_steps(self) -> list[Step]:
        return [s for s in self._program.steps if s.site and s.site.id in self._rows]

    def _broken_again(self, origins: Container[SiteId]) -> set[fx.Node]:
        """Return nodes that break with intact inputs, but not once the origins are repaired.

        There, a hidden fault resurfaces: x / inf is 0, and its logarithm is -inf.
        """
        return {
            step.node
            for step in self._wrong_steps()
            if step.site and step.site.id not in origins and not self._harmless(step)
            if self._wrong.isdisjoint(step.node.all_input_nodes)
        }

    def _only_negative(self, node: fx.Node) -> bool:
        step = self._steps.get(node)
        row = self._rows.get(step.site.id) if step and step.site else None
        return row is None or (row.fields["pos_inf"] == 0 and row.fields["nan"] == 0)

    def _is_mask(self, step: Step) -> bool:
        if step.node not in self._takers:
            return False
        reached = _downstream(step.node, self._wrong)
        reaches_output = any(node in reached for node in self._program.outputs)
        return not reaches_output and all(self._only_negative(node) for node in reached)

    def _mask_takers(self) -> set[fx.Node]:
        """Return nodes that are a mask, or fill in, add, select or cast one."""
        takers: set[fx.Node] = set()
        free = self._program.parameter_free
        for step in self._program.steps:
            if not step.makes_values:
                if any(source in takers for source in step.node.all_input_nodes):
                    takers.add(step.node)
                continue
            name = str(step.target).removeprefix("aten.").split(".")[0].rstrip("_")
            sources = step.node.all_input_nodes
            if step.node in free or (
                name in _MASKING
                and (
                    (name in _FILLING and self._fills_low(step))
                    or any((n in free or n in takers) and self._is_low(n) for n in sources)
                )
            ):
                takers.add(step.node)
        return takers

    def _fills_low(self, step: Step) -> bool:
        """Return whether a step fills in a number in the outer half of the format's range."""
        exact = step.site.original_args.values() if step.site is not None else ()
        values = (*step.node.args, *exact)
        numbers = [a for a in values if isinstance(a, float | int) and not isinstance(a, bool)]
        return any(abs(value) >= self._limit / 2 for value in numbers)

    def _is_low(self, node: fx.Node) -> bool:
        """Return whether a value reaches the outer half of the format's range."""
        step = self._steps.get(node)
        while step is not None and not step.makes_values and step.node.all_input_nodes:
            node = step.node.all_input_nodes[0]
            step = self._steps.get(node)
        if step is None or step.site is None:
            return node.op == "placeholder" and self._placeholder_peak(node) >= self._limit / 2
        return self._peaks.get(step.site.id, 0.0) >= self._limit / 2

    def _harmless(self, step: Step) -> bool:
        """Return whether a site is a mask, or only broken by one."""
        assert step.site is not None
        if step.site.id in self.masks:
            return True
        sources = [n for n in step.node.all_input_nodes if n in self._wrong]
        return bool(sources) and all(self._from_mask(n) for n in sources) and self._only_negative(step.node)

    def _from_mask(self, node: fx.Node) -> bool:
        step = self._steps[node]
        if step.site is not None and step.site.id in self.masks:
            return True
        if not step.makes_values:
            return all(self._from_mask(n) for n in node.all_input_nodes if n in self._wrong)
        return step.site is not None and step.site.id in self._rows and self._harmless(step)


def _downstream(start: fx.Node, through: Set[fx.Node] | None = None) -> set[fx.Node]:
    """Return a node and all that depend on it, if ``through`` is set only by way of these nodes."""
    reached, frontier = {start}, [start]
    while frontier:
        users = frontier.pop().users.keys() - reached
        users = users if through is None else users & through
        reached |= users
        frontier += users
    return reached
