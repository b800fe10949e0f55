"""Computes the FP32 value of each fake tensor of a trace, op by op, for code that reads values."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.core.errors import TraceFailed
from ampaudit.trace.eager_call import without_low_precision, writable
from ampaudit.trace.entry import layer_path
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.internals import (
    NO_VALUE,
    FakeTensor,
    without_autocast,
    without_modes,
    without_torch_function,
)
from ampaudit.trace.isolation import preserved
from ampaudit.trace.op_calls import OpCalled
from ampaudit.trace.opnames import converts, written_values
from ampaudit.trace.stack import calling_line
from ampaudit.trace.values import storage_id, widened

__all__ = ["Fp32Values", "computing"]

# the attribute of a fake tensor that holds its value: Module.to swaps no tensor that is weakly referenced
_VALUE = "ampaudit_fp32_value"
MAX_OPS = 100_000  # minutes of tracing


@contextmanager
def computing() -> Iterator[None]:
    """Compute with real tensors while a trace is being made."""
    with without_modes(), without_torch_function(), without_autocast(), torch.no_grad():
        yield


class Fp32Values:
    """The FP32 values of fake tensors, each for as long as its fake tensor exists.

    They are those of the reference: 16-bit dtypes are widened to float32, and arguments that the policy
    changed are taken as the FP32 model has them. The user's own tensors are never written to.
    """

    def __init__(self) -> None:
        self._constants: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # real tensors, kept alive
        self._shared: set[int] = set()  # storages of the user's own weights
        self._count = 0

    def give_model(
        self, model: nn.Module, fake_model: nn.Module, buffers: Mapping[str, torch.Tensor]
    ) -> None:
        """Give the fake parameters and buffers of a model the values of the real ones.

        Buffers may have others of earlier steps.
        """
        real = named_tensors(model)
        for name, fake in named_tensors(fake_model).items():
            if name not in real or _VALUE in vars(fake):
                continue
            if isinstance(real[name], nn.Parameter):
                value = without_low_precision(real[name], None)
                self._shared.add(storage_id(value))
            else:
                value = writable(buffers.get(layer_path(name), real[name]), None)
            vars(fake)[_VALUE] = value

    def give_input(self, fake: torch.Tensor, tensor: torch.Tensor) -> None:
        """Give a fake input the value of a real one."""
        vars(fake)[_VALUE] = writable(tensor, None)

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the FP32 value of a tensor of the trace; a real one is a constant."""
        if isinstance(tensor, FakeTensor):
            if _VALUE not in vars(tensor):
                raise RuntimeError(NO_VALUE)  # made by a fake kernel: the op stays whole
            found: torch.Tensor = vars(tensor)[_VALUE]
            return found
        if id(tensor) not in self._constants:
            self._constants[id(tensor)] = tensor, writable(tensor, None)
        return self._constants[id(tensor)][1]

    def call(self, called: OpCalled, original_args: Mapping[int | str, Any]) -> Any:
        """Return the result of an op on FP32 values."""
        with computing():
            self._keep_own_weights(called)
            args = tuple(original_args.get(i, value) for i, value in enumerate(called.args))
            kwargs = {name: original_args.get(name, value) for name, value in called.kwargs.items()}
            args, kwargs = pytree.tree_map_only(torch.Tensor, self.of, (widened(args), widened(kwargs)))
            result = called.op(*args, **kwargs)
            if converts(called.op) and result is args[0] and storage_id(result) not in self._shared:
                return result.clone()  # in 16 bits, a cast is a copy
            return result

    def runs(self, called: OpCalled) -> bool:
        """Return whether the kernel of an op takes these tensors in the dtypes of the trace.

        What torch describes the result of fake tensors with may be stricter, as for ``_grouped_mm``.
        """

        def copied(tensor: torch.Tensor) -> torch.Tensor:
            return self.of(tensor).to(tensor.dtype, copy=True)

        try:
            with computing(), preserved():
                args, kwargs = pytree.tree_map_only(torch.Tensor, copied, (called.args, called.kwargs))
                called.op(*args, **kwargs)
        except Exception:  # whatever a kernel raises
            return False
        return True

    def follow(self, called: OpCalled, original_args: Mapping[int | str, Any], result: Any) -> None:
        """Compute an op that was recorded on fake tensors.

        Raises:
            TraceFailed: the path has too many ops to be one that ends.
        """
        self._count += 1
        if self._count > MAX_OPS:
            line = calling_line()
            where = f"{line.file}:{line.line}: " if line is not None else ""
            raise TraceFailed(
                f"{where}the path of these inputs has more than {MAX_OPS:,} ops",
                hint="if a loop does not end, give it a limit; otherwise audit a smaller input",
            )
        self.give_result(result, self.call(called, original_args))

    def give_result(self, result: Any, values: Any) -> None:
        """Give the fake tensors among an op's results their values."""
        fakes, found = pytree.tree_leaves(result), pytree.tree_leaves(values)
        for fake, value in zip(fakes, found, strict=True):
            if isinstance(fake, torch.Tensor):
                vars(fake)[_VALUE] = value

    def _keep_own_weights(self, called: OpCalled) -> None:
        """Copy a weight of the user before an op writes to it."""
        for written in written_values(called.op, called.args, called.kwargs):
            if not isinstance(written, FakeTensor):
                continue
            value = self.of(written)
            if storage_id(value) in self._shared:
                vars(written)[_VALUE] = value.clone()
