"""Describes ATen ops: their names, properties, and the ops that they call."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache, partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.core.ops import having
from ampaudit.policy.schema import inner_op
from ampaudit.trace.internals import (
    DispatchKey,
    TorchDispatchMode,
    has_kernel,
    without_autocast,
    without_modes,
)

# arguments that norms write to although the schema does not say so, and the flags that make them
_STATISTICS = ("running_mean", "running_var")
_TRAINING = ("training", "train", "use_input_stats")
_UPDATING = ("batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats")

_CONVERSIONS = frozenset({"to", "_to_copy"})
CAST_OPS = _CONVERSIONS | {"type_as"}


@cache
def base_name(op: OpOverload) -> str:
    """Return the op's name without overload: ``softmax``, or ``mylib::softmax`` for a custom op."""
    return op._schema.name.removeprefix("aten::")


@cache
def argument_names(op: OpOverload) -> tuple[str, ...]:
    """Return the names of the op's arguments in order."""
    return tuple(argument.name for argument in op._schema.arguments)


def named_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return the arguments of a call by name; those left at their default are absent."""
    return dict(zip(argument_names(op), args, strict=False)) | kwargs


def converts(target: object) -> bool:
    """Return whether a node's target converts its first argument: ``to`` or ``_to_copy``."""
    return isinstance(target, OpOverload) and base_name(target) in _CONVERSIONS


@cache
def op_name(op: OpOverload) -> str:
    """Return the policy's name of an op: ``linear``, or ``softmax.int`` for a named overload."""
    base, overload = base_name(op), op._overloadname
    return base if overload in ("", "default") else f"{base}.{overload}"


@cache
def is_foreign(op: OpOverload) -> bool:
    """Return whether an op comes from outside PyTorch, so that its kernel alone knows what it computes."""
    return op.namespace not in ("aten", "prim", "prims")


@cache
def is_composite(op: OpOverload) -> bool:
    """Return whether the op only calls other ops (CompositeImplicitAutograd)."""
    return bool(
        has_kernel(op, "CompositeImplicitAutograd")
        and op.has_kernel_for_dispatch_key(DispatchKey.CompositeImplicitAutograd)
    )


@cache
def stays_whole(op: OpOverload) -> bool:
    """Return whether a composite op stays one site when no rule mentions it."""
    return base_name(op) in having("one_kernel") or inner_op(op_name(op)) is not None or is_view(op)


_COMPOSITE = ("ImplicitAutograd", "ExplicitAutograd", "ExplicitAutogradNonFunctional")


@cache
def composite_kernel(op: OpOverload) -> Callable[..., Any] | None:
    """Return the kernel of a composite op on every device; dispatch modes see its calls."""
    if has_kernel(op, "CPU"):
        return None
    keys = (f"Composite{kind}" for kind in _COMPOSITE)
    return next((partial(op._op_dk, getattr(DispatchKey, key)) for key in keys if has_kernel(op, key)), None)


@cache
def rounds_once(op: OpOverload) -> bool:
    """Return whether a composite op ends in one kernel, whose result is rounded once."""
    return base_name(op) in having("one_kernel") - having("rounds_inside")


@cache
def argument_kinds(op: OpOverload) -> tuple[tuple[str, str], ...]:
    """Return the name and type of each argument."""
    return tuple((argument.name, str(argument.type)) for argument in op._schema.arguments)


@cache
def is_view(op: OpOverload) -> bool:
    """Return whether every output shares memory with an unwritten input, whose values it has."""
    returns = op._schema.returns
    return bool(returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in returns)


@cache
def selects(op: OpOverload) -> bool:
    """Return whether the op only selects, moves or zeroes elements of its inputs."""
    return base_name(op) in having("selects")


def written_values(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[Any]:
    """Return the arguments that a call writes to, with lists flattened."""
    names, arguments = argument_names(op), named_arguments(op, args, kwargs)
    values = [arguments.get(names[position]) for position in written_arguments(op, args, kwargs)]
    return [item for value in values for item in (value if isinstance(value, list | tuple) else (value,))]


@cache
def may_write(op: OpOverload) -> bool:
    """Return whether some call of the op writes to an argument."""
    return bool(mutated_arguments(op)) or any(name in _STATISTICS for name in argument_names(op))


@cache
def mutated_arguments(op: OpOverload) -> tuple[int, ...]:
    """Return the positions of the arguments that the op writes to."""
    return tuple(
        index
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info is not None and argument.alias_info.is_write
    )


@cache
def returned_arguments(op: OpOverload) -> tuple[int, ...]:
    """Return the positions of the written arguments that the op returns."""
    returned = [r.alias_info.before_set for r in op._schema.returns if r.alias_info is not None]
    aliases = [(p, op._schema.arguments[p].alias_info) for p in mutated_arguments(op)]
    return tuple(p for p, alias in aliases if alias is not None and alias.before_set in returned)


def written_arguments(op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[int, ...]:
    """Return the positions of the arguments that a call writes to, even if the schema omits it.

    Norms update running statistics in training mode, which only a flag reveals.
    """
    arguments = named_arguments(op, args, kwargs)
    training = any(arguments.get(flag) is True for flag in _TRAINING)
    if "backward" in base_name(op) or not (training or base_name(op) in _UPDATING):
        return mutated_arguments(op)
    names = enumerate(argument_names(op))
    hidden = {p for p, name in names if name in _STATISTICS and arguments.get(name) is not None}
    return tuple(sorted({*mutated_arguments(op), *hidden}))


_PRODUCTS = having("product", "added_product", "weighted")


class InnerOps:
    """Finds the ops that other ops call, by running these once on the meta device."""

    def __init__(self) -> None:
        self._names: dict[tuple[OpOverload, str], frozenset[str]] = {}

    def mentioned(
        self, op: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], names: frozenset[str]
    ) -> bool:
        """Return whether an op that would stay whole calls one of these ops.

        A kernel that is not composite for autograd may need memory that fake tensors lack: of the ops that
        it calls, only products count.
        """
        if torch.Tag.nondeterministic_seeded in op.tags:  # a call would draw from the user's generator
            return False
        kernel = composite_kernel(op)
        if kernel is None or is_view(op) or inner_op(op_name(op)) is not None:
            return False
        key = (op, repr(pytree.tree_map_only(torch.Tensor, lambda t: t.ndim, (args, kwargs))))
        if key not in self._names:
            recorder = _OpNames()
            failures = contextlib.suppress(RuntimeError, NotImplementedError, TypeError, ValueError)
            with without_modes(), torch.no_grad(), without_autocast(), recorder, failures:
                meta_args = pytree.tree_map_only(torch.Tensor, on_meta, (args, kwargs))
                meta_args = pytree.tree_map_only(torch.SymInt, example_size, meta_args)
                kernel(*meta_args[0], **meta_args[1])
            self._names[key] = frozenset(recorder.names)  # up to where it reads values
        return bool(self._names[key] & (names if is_composite(op) else names & _PRODUCTS))


def on_meta(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor on the meta device with the sizes and strides of another one."""
    return empty_example(tensor, tensor.dtype, torch.device("meta"))


def empty_example(tensor: torch.Tensor, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor with the sizes and strides that another one has in this trace."""
    sizes, strides = (list(map(example_size, numbers)) for numbers in (tensor.shape, tensor.stride()))
    return torch.empty_strided(sizes, strides, dtype=dtype, device=device)


def example_size(size: int | torch.SymInt) -> Any:
    """Return the number that a symbolic size stands for in this trace, without a guard on it.

    ``None`` for one that depends on the data, unless the model has checked it since.
    """
    if not isinstance(size, torch.SymInt):
        return size
    return size.node.maybe_as_int() if size.node.hint is None else size.node.hint


class _OpNames(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.names: set[str] = set()

    def __torch_dispatch__(
        self, func: OpOverload, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        del types
        self.names.add(op_name(func))
        return func(*args, **(kwargs or {}))
