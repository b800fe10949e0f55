"""One node of the graph, prepared for execution."""

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

__all__ = ["Step", "differentiable", "noting_line", "widened_tensor", "widened_value"]


def widened_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a 16-bit tensor in float32 or complex64, and other tensors unchanged."""
    return tensor.to(WIDE[tensor.dtype]) if tensor.dtype in WIDE else tensor


def widened_value(value: Any) -> Any:
    """Return a tensor as ``widened_tensor`` does, and anything else unchanged."""
    return widened_tensor(value) if isinstance(value, torch.Tensor) else value


def differentiable(node: fx.Node) -> bool:
    """Whether a gradient can pass: the model's code has not switched gradients off there.

    A cast of the policy's passes it all the same: ops outside may share it.
    """
    record = node.meta.get(META_KEY)
    return record is None or record.inserted or not record.no_grad


@dataclass(frozen=True, slots=True)
class Step:
    """One node, prepared for execution.

    Attributes:
        node: the graph's node.
        target: the function to call.
        site: the site it is, ``None`` for tuple access and shape arithmetic.
        args: its arguments, with nodes in the places of values, on the run's device.
        kwargs: the same for keyword arguments.
        wide_args: its arguments with every 16-bit dtype constant replaced by float32.
        wide_kwargs: the same for keyword arguments.
        low_args: ``wide_args`` with numbers as a kernel for 16-bit tensors reads them.
        low_kwargs: the same for keyword arguments.
        computing: the 16-bit dtype to which operands are converted, if any is.
        gives_way: positions and names of the 0-dimensional tensors among them.
        dtypes: dtypes of its outputs in the converted model, ``None`` where an output is no tensor.
        mutates: positions of the arguments that it writes to.
        updates: those that its result does not show, such as running statistics, with their dtypes.
        random: whether it draws random numbers.
        rounds_inside: whether one float32 call and one rounding is not what it does in 16 bits.
        frees: nodes whose value is not needed after this step.
        decides: whether it turns floats into integers, booleans or whole numbers.
        choice: the stack of matrices of which a tensor chooses some.
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
        """Return the arguments, as nodes or values, that the step writes to."""
        op = self.node.target
        return written_values(op, args, kwargs) if self.mutates and isinstance(op, OpOverload) else []

    def written_at(self, position: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the argument at a position of the schema, as a node or a value, or ``None``."""
        assert isinstance(self.node.target, OpOverload)
        name = argument_names(self.node.target)[position]
        return args[position] if position < len(args) else kwargs.get(name)

    @property
    def low_precision(self) -> bool:
        """Whether an output is a 16-bit float."""
        return any(dtype in LOW_PRECISION_DTYPES for dtype in self.dtypes)

    @property
    def rounds(self) -> bool:
        """Whether anything is in 16 bits in the step: its output, or an operand that it converts."""
        return self.low_precision or self.computing is not None

    @property
    def in_place(self) -> bool:
        """Whether the result is the written argument."""
        return len(self.mutates) > len(self.updates)

    @property
    def makes_values(self) -> bool:
        """Whether the output can contain values that are in no input."""
        return self.site is not None and self.site.role not in (Role.VIEW, Role.SELECT)

    @property
    def observed(self) -> bool:
        """Whether the step makes new real or complex values."""
        if self.site is None or not self.makes_values:
            return False
        dtypes = (*self.dtypes, *(dtype for _, dtype in self.updates))
        return any(d is not None and (d.is_floating_point or d.is_complex) for d in dtypes)


@contextlib.contextmanager
def noting_line(step: Step) -> Iterator[None]:
    """Add the line of the model's code to errors of torch, and to any error of a kernel from elsewhere."""
    op = step.node.target
    try:
        yield
    except Exception as error:
        known = isinstance(error, RuntimeError | IndexError)
        if not known and not (isinstance(op, OpOverload) and is_foreign(op)):
            raise
        told = error if known else RuntimeError(f"{op}: {type(error).__name__}: {first_line(error)}")
        if step.site is not None and step.site.source is not None:
            told.add_note(f"{step.site.source.file}:{step.site.source.line}")
        raise told from (None if known else error)
