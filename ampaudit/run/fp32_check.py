"""Compares outputs with the user's own FP32 model if the converted graph may run other code."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import psutil
import torch
from torch import nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.core.errors import AuditError, ReferenceBroken, RunFailed, first_line
from ampaudit.policy import plain_fp32
from ampaudit.run.config import RunConfig
from ampaudit.run.device import guarded
from ampaudit.run.lockstep import Pair
from ampaudit.run.outputs import output_kind
from ampaudit.run.program import Program
from ampaudit.run.record import OutputDifference, RunRecord
from ampaudit.source.interface import Batch
from ampaudit.trace import TracedModel, trace
from ampaudit.trace.capture import quiet
from ampaudit.trace.converted import CodeDifference, Release, first_difference
from ampaudit.trace.entry import flatten_outputs, restored
from ampaudit.trace.failure import attempt_in_fp32, fp32_copy, model_failure, writable
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.functional import functionalized
from ampaudit.trace.graph import Slot
from ampaudit.trace.isolation import autocast_to_float32, seeded
from ampaudit.trace.path.recorder import PathTracing
from ampaudit.trace.twins import TwinCheck, TwinFailed, twins_checked
from ampaudit.trace.values import LOW_PRECISION_DTYPES, components

_UNWATCHED: AbstractContextManager[Any] = nullcontext()
_ELEMENTS = {"complex": "complex numbers", "float": "floating-point numbers", "integer": "integers"}


class Fp32Check:
    """Calls the FP32 model wherever the lock-step reference may differ from it.

    If the code did not read a precision while it was traced, FP32 runs the same code, and nothing is done.
    Otherwise the model is run eagerly, and differences are added to the ``code`` of the record.
    """

    def __init__(self, config: RunConfig, eager: EagerModel, record: RunRecord) -> None:
        self._config = config
        self._eager = eager
        self._record = record
        self._places: dict[int, tuple[TracedModel, CodeDifference | None]] = {}

    def outputs(
        self, model: nn.Module, program: Program, batch: Batch, number: int, pairs: Sequence[Pair]
    ) -> dict[str, torch.Tensor] | None:
        """Return the FP32 model's outputs by name, without those that cannot be compared.

        ``model`` is in the state before this batch, ``pairs`` are the outputs of the lock-step run.

        Returns:
            ``None`` if the reference computes the same as the FP32 model.

        Raises:
            ReferenceBroken: The FP32 model returns NaN or infinity, and the reference does not.
        """
        traced, code = program.traced, self._record.code
        try:
            fp32 = self._eager.outputs(model, batch, number)
        except Exception as error:
            cause = (
                error.__cause__ if isinstance(error, AuditError) and error.__cause__ is not None else error
            )
            code.failure = code.failure or f"{type(cause).__name__}: {first_line(cause)}"
            code.reads = code.reads or traced.reads
            code.place = code.place or self._place(model, traced, batch, number)
            return None
        code.batches += 1
        by_name = dict(zip(traced.outputs, pairs, strict=True))
        differences = _differences(by_name, fp32)
        if all(difference.agrees for difference in differences):
            return None
        broken = [name for name, tensor in fp32.items() if is_broken(tensor)]
        if any(name in by_name and not is_broken(by_name[name][0]) for name in broken):
            title = batch.title(number)
            raise ReferenceBroken(
                f"the FP32 model itself gives NaN or infinity in {title}: {broken[0]}, run eagerly"
            )
        place = self._place(model, traced, batch, number)
        if place is None:
            # the code is the same: ties may fall either way in FP32 as well, and random numbers may differ
            ties = all(d.agrees or (d.integers and d.problem is None) for d in differences)
            if ties or program.draws:
                return None
        code.note(differences, place, traced.reads)
        apart = {difference.name for difference in differences if difference.problem is not None}
        return {name: tensor for name, tensor in fp32.items() if name in by_name and name not in apart}

    def refuse_other_path(
        self, model: nn.Module, program: Program, batch: Batch, number: int, pairs: Sequence[Pair]
    ) -> None:
        """Compare the reference of a trace along one path with the model itself.

        Nothing is compared if the model draws random numbers, perhaps in another order, if it computes in 16
        bits itself, or if it writes to its parameters.

        Raises:
            RunFailed: They differ, so that the trace does not represent the model.
        """
        traced = program.traced
        written_names = {node.name for node in program.written}
        if traced.path is None or program.draws:
            return
        if any(p.slot is Slot.PARAMETER and p.node in written_names for p in traced.placeholders):
            return  # the call would write to the user's parameters
        try:
            fp32 = self._eager.outputs(model, batch, number)
        except AuditError:
            return  # it may need more memory than available, or 16-bit inputs
        differences = _differences(dict(zip(traced.outputs, pairs, strict=True)), fp32)
        other = next(
            (d for d in differences if not d.agrees and not (d.integers and d.problem is None)), None
        )
        if other is not None and not self._eager.computes_in_16_bits(model, batch, number):
            raise RunFailed(
                f"along the path of {batch.title(number)}, FP32 does not give the outputs of the model "
                f"itself ({other.name}{' ' + other.problem if other.problem else ' differs'})",
                hint="please report it; the verdict would not be about this model",
            )

    def unedited(self, model: nn.Module, batch: Batch, number: int) -> dict[str, torch.Tensor]:
        """Return the outputs of the user's FP32 model, with which a run of edited code is compared.

        Raises:
            RunFailed: The model cannot be called.
            ReferenceBroken: The model returns NaN or infinity.
        """
        try:
            outputs = self._eager.outputs(model, batch, number)
        except Exception as error:
            raise RunFailed(f"the FP32 model cannot be called: {first_line(error)}") from error
        broken = next((name for name, output in outputs.items() if is_broken(output)), None)
        if broken is not None:
            where = batch.title(number)
            raise ReferenceBroken(f"the FP32 model itself gives NaN or infinity in {where}: {broken}")
        return dict(outputs)

    def _place(
        self, model: nn.Module, traced: TracedModel, batch: Batch, number: int
    ) -> CodeDifference | None:
        """Return the first difference from FP32's trace; ``None`` if they agree or it cannot be traced."""
        if id(traced) not in self._places:
            config = self._config
            uncast = plain_fp32(whole=config.rules.op_names if config.rules is not None else frozenset())
            path = PathTracing.OFF if traced.path is None else PathTracing.ON
            settings = config.trace_config(uncast, uncast, number, path)
            try:
                fp32 = trace(model, batch.args, batch.kwargs, settings)
            except AuditError:
                self._record.code.untraced = True
                self._places[id(traced)] = traced, None
            else:
                fp32 = functionalized(fp32) if config.functionalize else fp32
                self._places[id(traced)] = traced, first_difference(traced, fp32)
        return self._places[id(traced)][1]


def _differences(pairs: Mapping[str, Pair], fp32: Mapping[str, Any]) -> list[OutputDifference]:
    differences = [_difference(name, pair, fp32.get(name)) for name, pair in pairs.items()]
    matched = {id(fp32[name]) for name in pairs if name in fp32}
    only = (name for name, tensor in fp32.items() if name not in pairs and id(tensor) not in matched)
    return [*differences, *(OutputDifference(name, problem="is returned in FP32 only") for name in only)]


def _difference(name: str, pair: Pair, fp32: torch.Tensor | None) -> OutputDifference:
    difference = OutputDifference(name)
    if fp32 is None:
        return replace(difference, problem="is returned in 16 bits only")
    if not all(isinstance(side, torch.Tensor) for side in pair):
        return difference
    reference, value = pair
    if reference.shape != fp32.shape:
        here, there = ("x".join(map(str, t.shape)) or "a scalar" for t in (reference, fp32))
        return replace(difference, problem=f"is {here}, and {there} in FP32")
    if output_kind(reference) != output_kind(fp32):
        here, there = (_ELEMENTS[output_kind(tensor)] for tensor in (reference, fp32))
        return replace(difference, problem=f"holds {here}, and {there} in FP32")
    if torch.equal(reference, fp32):
        return difference
    if output_kind(fp32) == "integer":
        wrong = (float((side != fp32).sum()) for side in (value, reference))
        return OutputDifference(name, None, True, float(fp32.numel()), *wrong)
    wrong = (_squares(_error(side, fp32)) for side in (value, reference))
    return OutputDifference(name, None, False, _squares(torch.where(fp32.isfinite(), fp32, 0)), *wrong)


def _error(value: torch.Tensor, fp32: torch.Tensor) -> torch.Tensor:
    """Return the difference, which is 0 between equal infinities, and between NaN and NaN."""
    value = value.to(fp32.dtype)
    same = (value == fp32) | (value.isnan() & fp32.isnan())
    return torch.where(same, 0, value - fp32)


def _squares(values: torch.Tensor) -> float:
    return float(torch.linalg.vector_norm(components(values), dtype=torch.float64)) ** 2


def is_broken(output: object) -> bool:
    """Return whether an output contains NaN, +inf or only -inf; some -inf is normal for masked scores."""
    if not isinstance(output, torch.Tensor) or not output.is_floating_point() or output.numel() == 0:
        return False
    return bool((output.isnan() | (output == torch.inf)).any() or (output == -torch.inf).all())


@contextmanager
def reporting_model_failures(model: nn.Module, batch: Batch) -> Iterator[None]:
    """Report a failure of the converted model as one of the user's model, if that fails as well.

    Kernels are stricter than shapes: torch.export traces a product of two dtypes that no kernel computes.

    Raises:
        SourceError: The model itself fails.
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
        result = func(*args, **(kwargs or {}))
        leaves = pytree.tree_leaves(result)
        self.low_precision |= any(getattr(leaf, "dtype", None) in LOW_PRECISION_DTYPES for leaf in leaves)
        return result


class EagerModel:
    """Calls a model in FP32 on a device, widening 16-bit weights, inputs and autocast regions.

    The model is not changed: each call uses a new copy, which shares the weights; policies that run side by
    side share the call.

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
            TwinFailed: A twin does not compute what its op computes.
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
        """Return whether the FP32 model computes in 16 bits, by its own casts."""
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
        """Return the model's outputs for a batch, by the names that a trace uses.

        A tensor that occurs several times has all its names, since in 16 bits a cast may make two of it.
        """
        if self._last is None or self._last[0] != number:
            self._last = None
            low = (t for t in named_tensors(model).values() if t.dtype in LOW_PRECISION_DTYPES)
            wide = 4 * sum(tensor.numel() for tensor in low)
            if self._release is not None and wide > psutil.virtual_memory().available // 2:
                raise RunFailed("streamed 16-bit weights do not fit into memory in FP32")
            args, kwargs = pytree.tree_map_only(
                torch.Tensor, lambda tensor: writable(tensor, self._device), (batch.args, batch.kwargs)
            )
            copied = fp32_copy(model, self._device)
            with (
                quiet(),
                guarded(self._device, batch),
                seeded(self._seed + number),
                autocast_to_float32(),
                twins_checked(self._twins),
                watch,
            ):
                outputs = flatten_outputs(copied(*restored(args), **restored(kwargs)), once=False)
            self._last = number, dict(outputs)
            if self._release is not None:
                for tensor in named_tensors(model).values():
                    self._release(tensor)
        return self._last[1]
