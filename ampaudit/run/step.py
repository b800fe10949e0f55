"""Steps: nodes of the graph prepared for execution."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import OpOverload

from ampaudit.core.errors import first_line
from ampaudit.trace.graph import Role, Site
from ampaudit.trace.opnames import argument_names, is_foreign, written_values
from ampaudit.trace.replay import META_KEY
from ampaudit.trace.stacks import StackChoice
from ampaudit.trace.values import LOW_PRECISION_DTYPES, WIDE

__all__ = ["Step", "differentiable", "noting_source_line", "widened_tensor", "widened_value"]


def widened_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Widen 16-bit tensors to float32 or complex64; return other tensors unchanged."""
    return tensor.to(WIDE[tensor.dtype]) if tensor.dtype in WIDE else tensor


def widened_value(value: Any) -> Any:
    """Apply ``widened_tensor`` to tensors; return other values unchanged."""
    return widened_tensor(value) if isinstance(value, torch.Tensor) else value


def differentiable(node: fx.Node) -> bool:
    """Return whether gradients pass a node, that is, the model's code has not disabled them there.

    Casts inserted by the policy always pass them, since ops outside ``no_grad`` may share a cast.
    """
    record = node.meta.get(META_KEY)
    return record is None or record.inserted or not record.no_grad


@dataclass(frozen=True, slots=True)
class Step:
    """One node, prepared for execution.

    Attributes:
        node: The graph's node.
        target: The function to call.
        site: The site of the node; ``None`` for tuple access and shape arithmetic.
        args: Arguments on the run's device, with nodes in the places of values.
        kwargs: The same for keyword arguments.
        wide_args: ``args`` with every 16-bit dtype constant replaced by float32.
        wide_kwargs: The same for keyword arguments.
        low_args: ``wide_args`` with numbers as a kernel for 16-bit tensors reads them.
        low_kwargs: The same for keyword arguments.
        computing: The 16-bit dtype to which operands are converted, if any.
        gives_way: Positions and names of the 0-dimensional tensors that are converted to it.
        dtypes: Dtypes of its outputs in the converted model; ``None`` for outputs that are not tensors.
        mutates: Positions of the arguments that it writes to.
        updates: Positions and dtypes of written arguments other than its result (running statistics).
        random: Whether it draws random numbers.
        rounds_inside: Whether it rounds more than once in 16 bits, unlike one rounded float32 call.
        frees: Nodes whose values are not needed after this step.
        decides: Whether it turns floats into integers, booleans or whole numbers.
        choice: The stack of matrices that it indexes by a tensor, if any.
    """

    node: fx.Node
    target: Callable[..., Any]
    site: Site | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    wide_args: tuple[Any, ...]
    wide_kwargs: dict[str, Any]
    low_args: tuple[Any, ...]
    low_kwargs: dict[str, Any]
    computing: torch.dtype | None
    gives_way: frozenset[int | str]
    dtypes: tuple[torch.dtype | None, ...]
    mutates: tuple[int, ...]
    updates: tuple[tuple[int, torch.dtype], ...]
    random: bool
    rounds_inside: bool
    frees: tuple[fx.Node, ...]
    decides: bool = False
    choice: StackChoice | None = None

    @property
    def differentiable(self) -> bool:
        """Whether a gradient can pass."""
        return differentiable(self.node)

    def written(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
        """Return the arguments that the step writes to, as nodes or values."""
        op = self.node.target
        return written_values(op, args, kwargs) if self.mutates and isinstance(op, OpOverload) else []

    def written_at(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument at a position of the schema, as a node or value; ``None`` if omitted."""
        assert isinstance(self.node.target, OpOverload)
        name = argument_names(self.node.target)[position]
        return args[position] if position < len(args) else kwargs.get(name)

    @property
    def low_precision(self) -> bool:
        """Whether an output is a 16-bit float."""
        return any(dtype in LOW_PRECISION_DTYPES for dtype in self.dtypes)

    @property
    def rounds(self) -> bool:
        """Whether an output, or an operand that the step converts, is in 16 bits."""
        return self.low_precision or self.computing is not None

    @property
    def in_place(self) -> bool:
        """Whether the result is the written argument."""
        return len(self.mutates) > len(self.updates)

    @property
    def makes_values(self) -> bool:
        """Whether the step computes values, rather than view or select those of its inputs."""
        return self.site is not None and self.site.role not in (Role.VIEW, Role.SELECT)

    @property
    def observed(self) -> bool:
        """Whether the step computes real or complex values."""
        if self.site is None or not self.makes_values:
            return False
        dtypes = (*self.dtypes, *(dtype for _, dtype in self.updates))
        return any(d is not None and (d.is_floating_point or d.is_complex) for d in dtypes)


@contextlib.contextmanager
def noting_source_line(step: Step) -> Iterator[None]:
    """Add the line of the model's code to errors of torch and of third-party kernels."""
    op = step.node.target
    try:
        yield
    except Exception as error:
        from_torch = isinstance(error, RuntimeError | IndexError)
        if not from_torch and not (isinstance(op, OpOverload) and is_foreign(op)):
            raise
        reported = error if from_torch else RuntimeError(f"{op}: {type(error).__name__}: {first_line(error)}")
        if step.site is not None and step.site.source is not None:
            reported.add_note(f"{step.site.source.file}:{step.site.source.line}")
        raise reported from (None if from_torch else error)
