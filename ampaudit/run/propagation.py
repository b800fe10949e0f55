"""Follows faults through an unrepaired run: harmless masks, and the sites that each origin poisons.

A repaired element gets the reference's value, clamped to the format. Values computed from it also follow the
reference, so that later sites are audited as if the fault had not happened, and all independent origins are
found in one pass. A value that is wrong because its input was is not an origin; elementwise ops decide this
per element, other ops for the whole value.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Set
from typing import Any

import torch
from torch import fx

from ampaudit.core.ops import having
from ampaudit.core.sites import SiteId
from ampaudit.core.text import is_number, signal_to_noise_db
from ampaudit.run.lockstep import Observer, StepCall
from ampaudit.run.measure import as_complex, finite_peak
from ampaudit.run.meter import MeasuredValue, Meter, float_outputs
from ampaudit.run.program import MemoryVersion, NodeOrMemory, Program, Step
from ampaudit.run.record import RIGHT_DB, Fate, Origin
from ampaudit.trace.graph import Slot
from ampaudit.trace.values import LOW_PRECISION_DTYPES, components

_FILLING = having("constant", "fills")
# ops through which an additive mask reaches its softmax
_MASKING = _FILLING | {"add", "sub", "mul", "minimum", "to", "_to_copy"}


class FaultPropagation:
    """The wrong sites of one unrepaired batch, and the paths between them.

    A view is wrong where its source is. ``masks`` are sites whose only fault is -inf in a value that is, or
    includes, a mask (independent of parameters, at the bottom of the format's range), if every path from
    there ends in finite values: a softmax turned them into zeros. ``by_design`` are sites near the limit
    because of a constant or a mask, whether or not anything is wrong there. There, a floating-point
    input counts as a mask if it holds 0 and 1 only, or numbers from the bottom of the range up to 0.
    """

    def __init__(
        self,
        program: Program,
        measured: Iterable[MeasuredValue],
        limit: float,
        placeholder: Callable[[fx.Node], torch.Tensor],
    ) -> None:
        self._program = program
        self._limit = limit
        self._placeholder = placeholder
        self._rows: dict[SiteId, MeasuredValue] = {}
        self._peaks: dict[SiteId, float] = {}
        self._energies: dict[SiteId, tuple[float, float]] = {}
        bad: set[tuple[SiteId, int | None]] = set()
        stored = {
            p.node: p.name for p in program.traced.placeholders if p.slot in (Slot.BUFFER, Slot.CONSTANT)
        }
        self._inputs = {p.node: p for p in program.traced.placeholders if p.slot is Slot.INPUT}
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
        self._order = {step.node: number for number, step in enumerate(program.steps)}
        self._users: dict[NodeOrMemory, list[NodeOrMemory]] = {}
        for user in dict.fromkeys((*self._steps, *program.writers)):
            for source in program.sources(user):
                self._users.setdefault(source, []).append(user)
        # wrong results, and wrong arguments that were written
        self._at = {step.site.id: step.node for step in program.steps if step.site is not None}
        self._parts = {(self._at[site], position) for site, position in bad}
        self._carriers = self._mask_carriers(program.free_of(set()))
        self._wrong = self._wrong_nodes()
        self.masks = {step.site.id for step in self._wrong_steps() if step.site and self._is_mask(step)}
        self._masked = self._values_from_masks()
        large = {s.site.id for s in program.steps if s.site and self._peaks.get(s.site.id, 0.0) >= limit / 4}
        data = {node for node in program.data if not self._holds_mask(node)} if large else set()
        carriers = self._mask_carriers(program.free_of(data)) if large else set()
        self.by_design = {
            s.site.id for s in program.steps if s.site and s.site.id in large and s.node in carriers
        }

    def _downstream(
        self, starts: Set[NodeOrMemory], through: Set[NodeOrMemory] | None = None
    ) -> set[NodeOrMemory]:
        """Return values and all that depend on them; with ``through``, only along paths of those values."""
        reached, frontier = set(starts), list(starts)
        while frontier:
            users = set(self._users.get(frontier.pop(), ())) - reached
            users = users if through is None else users & through
            reached |= users
            frontier += users
        return reached

    def _reach_output(self, values: Container[NodeOrMemory]) -> bool:
        """Return whether the outputs depend directly on any of these values."""
        output = self._program.traced.graph.output_node()
        return any(source in values for source in self._program.sources(output))

    @property
    def need_repair(self) -> bool:
        """Whether anything besides harmless masks is wrong."""
        return any(step.node not in self._masked for step in self._wrong_steps())

    @property
    def doubtful(self) -> set[SiteId]:
        """Sites that turn inf or NaN into finite values, and are inaccurate for whatever reason."""
        return {site for site in self._hiding(self._wrong) if self._accuracy(site) < RIGHT_DB}

    def narrow(self, errors: Mapping[SiteId, float]) -> None:
        """Count only these squared errors of sites, which are not inaccurate for other reasons."""
        self._energies |= {site: (self._energies[site][0], error) for site, error in errors.items()}

    def origins(self, sites: Set[SiteId], batch: int, known: Set[SiteId]) -> Iterator[Origin]:
        """Describe the origins of a batch, in graph order, except for those that are known.

        Each has the sites that it poisons, and whether an output shows it.
        """
        # these break with intact inputs, but not once the origins are repaired: a hidden fault resurfaces,
        # such as in the logarithm of x / inf, which is -inf
        again = {
            step.node
            for step in self._wrong_steps()
            if step.site and step.site.id not in sites and step.node not in self._masked
            if self._wrong.isdisjoint(self._program.sources(step.node))
        }
        return (self._origin(site, batch, again) for site in self._at if site in sites - known)

    def _origin(self, site: SiteId, batch: int, again: Set[fx.Node]) -> Origin:
        start = self._at[site]
        reached = self._downstream({start}, self._wrong)
        if again:
            reached |= self._downstream(again & self._downstream({start}), self._wrong)
        poisons = self._sites(reached - {start})
        hiding = self._hiding(reached)
        buffer = self._buffer(start)
        in_output = self._reach_output(reached)
        fate: Fate = "reaches the output" if in_output or not hiding or buffer else "recovered"
        worst = min((self._accuracy(hidden) for hidden in hiding), default=math.inf)
        return Origin(
            site,
            batch,
            poisons,
            fate,
            hiding,
            worst if worst < math.inf else None,
            buffer,
            self._input(start),
        )

    def _hiding(self, wrong: Set[NodeOrMemory]) -> tuple[SiteId, ...]:
        """Return the sites that read wrong values and compute finite ones, in graph order."""
        users = {user for value in wrong for user in self._users.get(value, ())}
        return tuple(site for site in self._sites(users - wrong) if site in self._energies)

    def _accuracy(self, site: SiteId) -> float:
        """Return the accuracy of a site in dB; without signal nothing of it is left."""
        signal, error = self._energies[site]
        db = signal_to_noise_db(signal, error) if signal else 0.0
        return db if error and db is not None else math.inf

    def _input(self, node: fx.Node) -> tuple[str, float] | None:
        """Return the name and peak of an input that a step reads and that is infinite only in 16 bits."""
        for source in map(self._viewed, node.all_input_nodes):
            place = self._inputs.get(source.name)
            if place is None or place.dtype not in LOW_PRECISION_DTYPES:
                continue
            tensor = self._placeholder(source)
            if bool((tensor.to(place.dtype).isinf() & tensor.isfinite()).any()):
                return place.name, finite_peak(tensor)
        return None

    def _viewed(self, node: fx.Node) -> fx.Node:
        """Return the value that a node is a view of, or the node itself."""
        while (step := self._steps.get(node)) is not None and not step.makes_values and node.all_input_nodes:
            node = node.all_input_nodes[0]
        return node

    def _sites(self, values: Set[NodeOrMemory]) -> tuple[SiteId, ...]:
        """Return the sites that compute some values, in graph order."""
        numbers = sorted(self._order[v] for v in values if isinstance(v, fx.Node) and v in self._order)
        steps = (self._program.steps[number] for number in numbers)
        return tuple(step.site.id for step in steps if step.site and step.makes_values)

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

    def _wrong_nodes(self) -> set[NodeOrMemory]:
        wrong: set[NodeOrMemory] = set()
        right: set[NodeOrMemory] = {
            value for value in self._program.writers if isinstance(value, MemoryVersion)
        }
        for step in self._program.steps:
            if step.makes_values:
                is_wrong = step.site is not None and step.site.id in self._rows
            else:
                is_wrong = any(source in wrong for source in self._program.sources(step.node))
            if is_wrong:  # and so is what it writes to from here on
                reached = self._downstream({step.node}, right)
                right -= reached
                wrong |= reached
        return wrong

    def _wrong_steps(self) -> list[Step]:
        return [s for s in self._program.steps if s.site and s.site.id in self._rows]

    def _only_negative(self, node: fx.Node) -> bool:
        step = self._steps.get(node)
        row = self._rows.get(step.site.id) if step and step.site else None
        return row is None or (row.fields["pos_inf"] == 0 and row.fields["nan"] == 0)

    def _is_mask(self, step: Step) -> bool:
        if step.node not in self._carriers:
            return False
        reached = self._downstream({step.node}, self._wrong)
        nodes = (value for value in reached if isinstance(value, fx.Node))
        return not self._reach_output(reached) and all(map(self._only_negative, nodes))

    def _holds_mask(self, node: fx.Node) -> bool:
        """Return whether a floating-point input holds what a mask does."""
        tensor = self._placeholder(node)
        if tensor.is_complex() or not tensor.numel():
            return False
        least, most = map(float, tensor.aminmax())
        if most == 0.0:
            return least <= -self._limit / 4
        return (least, most) == (0.0, 1.0) and bool((tensor == tensor * tensor).all())

    def _mask_carriers(self, free: Set[NodeOrMemory]) -> set[fx.Node]:
        """Return the nodes of ``free``, and those that fill in, add, cast or view a mask."""
        carriers: set[fx.Node] = set()
        for step in self._program.steps:
            if not step.makes_values:
                if any(source in carriers for source in step.node.all_input_nodes):
                    carriers.add(step.node)
                continue
            name = str(step.target).removeprefix("aten.").split(".")[0].rstrip("_")
            sources = step.node.all_input_nodes
            if step.node in free or (
                name in _MASKING
                and (
                    (name in _FILLING and self._fills_low(step))
                    or any((n in free or n in carriers) and self._is_low(n) for n in sources)
                )
            ):
                carriers.add(step.node)
        return carriers

    def _fills_low(self, step: Step) -> bool:
        """Return whether a step fills in a number in the outer half of the format's range."""
        exact = step.site.original_args.values() if step.site is not None else ()
        values = (*step.node.args, *exact)
        return any(abs(value) >= self._limit / 2 for value in filter(is_number, values))

    def _is_low(self, node: fx.Node) -> bool:
        """Return whether a value reaches the outer half of the format's range."""
        node = self._viewed(node)
        step = self._steps.get(node)
        if step is None or step.site is None:
            return node.op == "placeholder" and finite_peak(self._placeholder(node)) >= self._limit / 2
        return self._peaks.get(step.site.id, 0.0) >= self._limit / 2

    def _values_from_masks(self) -> set[NodeOrMemory]:
        """Return the wrong values that are masks, or only broken by masks."""
        masked: set[NodeOrMemory] = set()
        memory_after = self._program.memory_after()

        def is_masked(value: NodeOrMemory) -> bool:
            return all(s in masked for s in self._program.sources(value) if s in self._wrong)

        for step in self._program.steps:
            node, site = step.node, step.site
            if node in self._wrong:
                is_value = step.makes_values
                by_others = not is_value or not self._wrong.isdisjoint(self._program.sources(node))
                is_harmless = by_others and is_masked(node) and (not is_value or self._only_negative(node))
                if is_harmless or (site is not None and site.id in self.masks):
                    masked.add(node)
            masked.update(m for m in memory_after.get(node, ()) if m in self._wrong and is_masked(m))
        return masked


class HiddenErrors(Observer):
    """Sums the errors of the elements that elementwise ops compute from broken ones."""

    def __init__(self, sites: Set[SiteId]) -> None:
        self._sites = sites
        self.errors: dict[SiteId, float] = {}  # squared, by site

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Measure the elements that read broken ones; of ops that are not elementwise, all may."""
        single = isinstance(reference, torch.Tensor) and reference.shape == value.shape and not step.mutates
        pointwise = single and torch.Tag.pointwise in getattr(step.target, "tags", ())
        if step.site is not None and step.site.id in self._sites and pointwise:
            error = (value - reference).abs().double().square()
            inputs = ((r, v) for r, v in call.inputs.values() if isinstance(v, torch.Tensor))
            masks = (mask for r, v in inputs if (mask := _wrong(r, v)) is not None)
            broken = functools.reduce(torch.logical_or, masks, error.isnan())
            self.errors[step.site.id] = float(error[broken & error.isfinite()].sum())
        return value


class RepairingMeter(Observer):
    """Measures like ``Meter``, repairs broken elements, and records which sites are origins."""

    def __init__(self, meter: Meter, program: Program, masks: set[SiteId]) -> None:
        self.meter = meter
        self._program = program
        self.origins: list[SiteId] = []  # sites that went wrong although their inputs were intact
        self._masks = masks
        # masks of the repaired elements of each node's value
        self._repaired: dict[fx.Node, torch.Tensor] = {}
        self._memory_after = program.memory_after()
        self._repaired_memory: set[fx.Node] = set()  # by root

    def state(self) -> dict[str, Any]:
        """Return the measurements and repairs as plain data and tensors."""
        repaired = {node.name: mask for node, mask in self._repaired.items()}
        return {"meter": self.meter.state(), "origins": list(self.origins), "repaired": repaired}

    def forget(self, live: Container[fx.Node]) -> None:
        """Drop the masks of values that are no longer live."""
        self._repaired = {node: mask for node, mask in self._repaired.items() if node in live}

    def restore(self, state: dict[str, Any]) -> None:
        """Restore the state of another process."""
        self.meter.restore(state["meter"])
        self.origins = state["origins"]
        nodes = {node.name: node for node in self._program.traced.graph.nodes}
        self._repaired = {}
        for name, mask in state["repaired"].items():
            self._mark(nodes[name], mask)

    def observe(self, step: Step, reference: Any, value: Any, call: StepCall) -> Any:
        """Measure; if elements are broken, attribute the fault and repair them."""
        self.meter.observe(step, reference, value, call)
        if step.site is not None and step.site.id in self._masks:
            return value
        if not step.makes_values:
            self._follow(step, value, call)
            return value
        self._repair_updates(step, call)
        if not any(True for _ in float_outputs(reference, value)):
            return value
        single = isinstance(reference, torch.Tensor) and reference.shape == value.shape
        affected = self._affected(step, reference) if single else None
        wrong = next((m for r, v in float_outputs(reference, value) if (m := _wrong(r, v)) is not None), None)
        if wrong is not None and single and reference.is_complex():
            wrong = wrong.any(-1)  # one component of a complex number is enough
        if wrong is not None and step.site is not None and self._is_origin(step, wrong, affected):
            self.origins.append(step.site.id)
        if wrong is None and affected is None:
            return value
        if not single:
            assert wrong is not None
            self._mark(step.node, wrong)
            return _repaired_list(reference, value, step)
        replaced = functools.reduce(torch.logical_or, (m for m in (wrong, affected) if m is not None))
        # FP32's value may exceed the format over many ops: values added to it share the fault
        beyond = reference.abs() > _limit(step.dtypes[0], value.dtype)
        mark = beyond & replaced if wrong is None else beyond & replaced | wrong
        if bool(mark.any()):
            self._mark(step.node, mark)
        return _replace(reference, value, replaced, step.dtypes[0], bool(step.mutates))

    def _repair_updates(self, step: Step, call: StepCall) -> None:
        """Repair buffers that the step has written, even if this run does not read them."""
        for (position, reference, value), (_, dtype) in zip(call.updates(step), step.updates, strict=True):
            wrong = _wrong(reference, value) if value.is_floating_point() else None
            if wrong is not None:
                if step.site is not None and self._is_origin(step, wrong, None):
                    self.origins.append(step.site.id)
                _replace(reference, value, wrong, dtype, in_place=True)
                target = step.written_at(position, step.node.args, dict(step.node.kwargs))
                self._repaired[target] = wrong | self._repaired.get(target, wrong)

    def _affected(self, step: Step, reference: torch.Tensor) -> torch.Tensor | None:
        """Return the elements that depend on a repaired one."""
        masks = [self._repaired[n] for n in step.node.all_input_nodes if n in self._repaired]
        was_written = self._was_written(step)
        if not masks and not was_written:
            return None
        if not was_written and torch.Tag.pointwise in getattr(step.target, "tags", ()):
            try:
                affected = torch.zeros(reference.shape, dtype=torch.bool, device=reference.device)
                for mask in masks:
                    affected |= mask
                return affected
            except RuntimeError:
                pass
        return torch.ones(reference.shape, dtype=torch.bool, device=reference.device)

    def _is_origin(self, step: Step, wrong: torch.Tensor, affected: torch.Tensor | None) -> bool:
        if affected is not None:
            return bool((wrong & ~affected).any())
        is_repaired = any(node in self._repaired for node in step.node.all_input_nodes)
        return not is_repaired and not self._was_written(step)

    def _mark(self, node: fx.Node, mask: torch.Tensor) -> None:
        """Keep which elements of a node's value were repaired."""
        self._repaired[node] = mask
        self._repaired_memory.update(memory.root for memory in self._memory_after.get(node, ()))

    def _was_written(self, step: Step) -> bool:
        """Return whether the step reads memory that was repaired through another node; where is unknown."""
        memory = self._program.writers.get(step.node, ())
        return any(isinstance(m, MemoryVersion) and m.root in self._repaired_memory for m in memory)

    def _follow(self, step: Step, value: Any, call: StepCall) -> None:
        """Apply an op that selects, moves or reshapes elements to their masks."""
        sources = [node for node in step.node.all_input_nodes if node in self._repaired]
        if not isinstance(value, torch.Tensor):
            return
        if self._was_written(step):
            self._mark(step.node, torch.ones_like(value, dtype=torch.bool))
            return
        if not sources:
            return

        def mark_of(node: fx.Node) -> Any:
            operand = call.inputs[node][1]
            if isinstance(operand, torch.Tensor) and (operand.is_floating_point() or operand.is_complex()):
                return self._repaired.get(node, torch.zeros_like(operand, dtype=torch.bool))
            return operand

        result = None
        if step.site is not None and not step.mutates:
            with contextlib.suppress(RuntimeError, TypeError):
                result = step.target(*fx.node.map_arg(step.args, mark_of), **call.kwargs)
        if not isinstance(result, torch.Tensor) or result.dtype is not torch.bool:
            # the op does not support booleans, or accesses one of several outputs
            mark = self._repaired[sources[0]]
            result = mark if mark.shape == value.shape else torch.ones_like(value, dtype=torch.bool)
        if bool(result.any()):
            self._mark(step.node, result)


def _wrong(reference: torch.Tensor, value: torch.Tensor) -> torch.Tensor | None:
    if reference.shape != value.shape:
        return None
    mask = (reference.isfinite() & ~value.isfinite()) | (value.isnan() & ~reference.isnan())
    return mask if bool(mask.any()) else None


def _repaired_list(reference: Any, value: Any, step: Step) -> Any:
    """Repair each of several outputs."""
    items = []
    for first, second, dtype in zip(reference, value, step.dtypes, strict=True):
        mask = None
        if isinstance(second, torch.Tensor) and (second.is_floating_point() or second.is_complex()):
            mask = _wrong(first, second)
        items.append(second if mask is None else _replace(first, second, mask, dtype, False))
    return type(value)(items)


def _limit(dtype: torch.dtype | None, carrier: torch.dtype) -> float:
    return torch.finfo(dtype if dtype in LOW_PRECISION_DTYPES else carrier).max


def _replace(
    reference: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor,
    dtype: torch.dtype | None,
    in_place: bool,
) -> torch.Tensor:
    """Replace masked elements by the reference's value, clamped to the format and rounded."""
    if value.is_complex():
        real = torch.float16 if dtype is torch.complex32 else dtype
        parts = components(reference), components(value), mask.unsqueeze(-1), real
        repaired = as_complex(_replace(*parts, in_place=False))
        return value.copy_(repaired) if in_place else repaired
    limit = _limit(dtype, value.dtype)
    mask = mask & reference.isfinite()
    replacement = reference.clamp(-limit, limit)
    if dtype in LOW_PRECISION_DTYPES:
        replacement = replacement.to(dtype)
    repaired = torch.where(mask, replacement.to(value.dtype), value)
    return value.copy_(repaired) if in_place else repaired
