"""Runs the user's own FP32 model eagerly, since a trace may have followed another code path."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.core.errors import RunFailed, first_line
from ampaudit.run.guards import guarded
from ampaudit.source.interface import Batch
from ampaudit.trace.capture import quiet
from ampaudit.trace.converted import Release
from ampaudit.trace.eager_call import attempt_in_fp32, fp32_copy, writable
from ampaudit.trace.entry import flatten_outputs
from ampaudit.trace.failure import model_failure
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.holders import restored
from ampaudit.trace.isolation import seeded
from ampaudit.trace.twin_check import TwinCheck, twins_checked
from ampaudit.trace.twins import TwinFailed
from ampaudit.trace.values import LOW_PRECISION_DTYPES

__all__ = ["EagerModel", "reporting_model_failures"]

_UNWATCHED: AbstractContextManager[Any] = nullcontext()


@contextmanager
def reporting_model_failures(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Report failures of the converted model as the user's model's if that fails as well.

    Kernels are stricter than shapes: torch.export traces a product of two dtypes that no kernel computes.

    Raises:
        SourceError: the model itself fails.
    """
    try:
        yield
    except RunFailed as error:
        kernel = error.__cause__  # none if the run was refused before it began
        if kernel is None or isinstance(kernel, torch.OutOfMemoryError) or "out of memory" in str(error):
            raise
        attempt = attempt_in_fp32(model, batch.args, batch.kwargs)
        if attempt.error is None:
            raise
        raise model_failure(attempt.error, model, batch.args, batch.kwargs) from attempt.error


class _LowPrecisionWatch(TorchDispatchMode):
    """Records whether any op returns 16-bit numbers."""

    low_precision = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Call the op."""
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(result)
        self.low_precision |= any(getattr(leaf, "dtype", None) in LOW_PRECISION_DTYPES for leaf in leaves)
        return result


class EagerModel:
    """Calls a model in FP32 on a device, widening 16-bit weights and inputs without changing the model.

    Each call uses a new copy, which shares the weights; policies that run side by side share the call.

    Args:
        device: Device to run on.
        seed: Seed of the random numbers, to which the number of the batch is added.
        release: Function that frees the memory of a weight, if weights are left on disk.
    """

    def __init__(self, device: torch.device, seed: int, release: Release | None) -> None:
        self._device = device
        self._seed = seed
        self._release = release
        self._last: tuple[int, dict[str, torch.Tensor]] | None = None
        self._twins = TwinCheck()

    def check_twins(self, ops: Iterable[str], model: nn.Module, batch: Batch, number: int) -> dict[str, str]:
        """Check twins against their ops' kernels by calling the model.

        Returns:
            The reason why the twin of an op could not be checked, by op; empty if it agrees.

        Raises:
            TwinFailed: a twin computes something else than its op.
        """
        otherwise = "the FP32 model does not call it"
        self._twins.begin_batch()
        try:
            self.outputs(model, batch, number)
        except TwinFailed:
            raise
        except Exception as error:  # whatever the model raises; its run reports more
            otherwise = f"the FP32 model cannot be called: {first_line(error)}"
        outcomes = dict.fromkeys(self._twins.checked, "") | self._twins.unchecked
        return {op: outcomes.get(op, otherwise) for op in ops}

    def computes_in_16_bits(self, model: nn.Module, batch: Batch, number: int) -> bool:
        """Return whether the FP32 model computes in 16 bits, by its own autocast or casts."""
        self._last, watch = None, _LowPrecisionWatch()
        self.outputs(model, batch, number, watch)
        return watch.low_precision

    @torch.no_grad()
    def outputs(
        self,
        model: nn.Module,
        batch: Batch,
        number: int,
        watch: AbstractContextManager[Any] = _UNWATCHED,
    ) -> dict[str, torch.Tensor]:
        """Return the model's outputs for a batch, by the names that a trace uses."""
        if self._last is None or self._last[0] != number:
            self._last = None
            low = (tensor.dtype in LOW_PRECISION_DTYPES for tensor in named_tensors(model).values())
            if self._release is not None and any(low):
                raise RunFailed("streamed 16-bit weights cannot be held in FP32")
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda tensor: writable(tensor, self._device), (batch.args, batch.kwargs)
            )
            copied = fp32_copy(model, self._device)
            with (
                quiet(),
                guarded(self._device, batch),
                seeded(self._seed + number),
                twins_checked(self._twins),
                watch,
            ):
                outputs = flatten_outputs(copied(*restored(args), **restored(kwargs)))
            self._last = number, dict(outputs)
            if self._release is not None:
                for tensor in named_tensors(model).values():
                    self._release(tensor)
        return self._last[1]
