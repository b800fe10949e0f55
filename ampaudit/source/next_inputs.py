"""Makes the inputs of the next step from a step's outputs: calls the user's function, or a built-in one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError, UsageError
from ampaudit.source.decoding import decoding, generates
from ampaudit.source.diffusion import DiffusionSteps, is_scheduler
from ampaudit.source.interface import Batch
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.entry import with_objects_open
from ampaudit.trace.holders import restored
from ampaudit.trace.values import inexact

__all__ = ["NEXT_INPUTS", "NothingFedBack", "call_next_inputs", "refuse_misfit", "stepping"]

NEXT_INPUTS = "next_inputs(outputs, inputs)"
_HINT = "return the inputs of the next step as example_inputs() does: a tensor, a tuple or a dict"
NextInputs = Callable[[Any, Any], Any]


class NothingFedBack(UsageError):
    """Raised by the built-in step if no output is like an input."""


def stepping(
    model: nn.Module, batches: Sequence[Batch], declared: Any, steps: int
) -> tuple[tuple[Batch, ...], NextInputs, str]:
    """Return the batches of the first step, what makes the inputs of the later ones, and that in words.

    Args:
        model: the user's.
        batches: as they are given.
        declared: the user's function, or a scheduler of diffusion models; ``None`` for the built-in ones.
        steps: how many there are.

    Raises:
        UsageError: nothing of this is known, or it cannot make so many steps.
    """
    if is_scheduler(declared):
        function = DiffusionSteps(declared)
        first = tuple(DiffusionSteps(declared).first(batch, steps) for batch in batches)
        return first, function, f"the sample, by {type(declared).__name__}"
    if declared is not None and not callable(declared):
        raise UsageError(
            f"next_inputs is of type {type(declared).__name__}",
            hint=f"declare a function {NEXT_INPUTS}, or a scheduler with step() and timesteps",
        )
    if declared is not None:
        return tuple(batches), declared, NEXT_INPUTS
    if generates(model):
        return *decoding(model, batches, steps), "the most likely token and the cache (built in)"
    return tuple(batches), recurrent, "outputs that are like inputs (built in)"


def call_next_inputs(function: NextInputs, outputs: Any, batch: Batch, call: str) -> Batch:
    """Call a function for the next inputs, and return them with objects open.

    Raises:
        InputError: it returns something else.
        SourceError: it raises.
    """
    args, kwargs = restored((batch.args, batch.kwargs))
    given = kwargs if kwargs and not args else args[0] if len(args) == 1 else args
    with calling_user_code(f"{NEXT_INPUTS} after {call}"):
        found = function(outputs, given)
    if isinstance(found, torch.Tensor):
        made = Batch((found,), kwargs if args else {})
    elif isinstance(found, Mapping) and found and all(isinstance(name, str) for name in found):
        made = Batch(args if kwargs else (), {**kwargs, **found})
    elif isinstance(found, tuple | list) and found:
        made = Batch(tuple(found), kwargs if args else {})
    else:
        what = "nothing" if found is None else type(found).__name__
        raise InputError(f"{NEXT_INPUTS} returned {what} after {call}", hint=_HINT)
    made = Batch(*with_objects_open((made.args, made.kwargs)))
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((made.args, made.kwargs))):
        raise InputError(f"{NEXT_INPUTS} returned no tensor after {call}", hint=_HINT)
    return made


def refuse_misfit(model: nn.Module, batch: Batch, call: str) -> None:
    """Raise for next inputs that the model's forward does not take.

    Raises:
        InputError: the message says what is missing or too much.
    """
    args, kwargs = restored((batch.args, batch.kwargs))
    try:
        signature = inspect.signature(model.forward)
        signature.bind(*args, **kwargs)
    except ValueError:
        return
    except TypeError as error:
        takes = f"forward({', '.join(signature.parameters)})"
        raise InputError(
            f"the inputs that {NEXT_INPUTS} returned after {call} do not fit {takes}: {error}", hint=_HINT
        ) from error


def recurrent(outputs: Any, inputs: Any) -> Any:
    """Feed the state of a recurrent model back.

    The last output that has the structure and shapes of the last input is the state: ``model(x, state)``
    returns ``state``, or ``(y, state)``. The other inputs stay.

    Raises:
        NothingFedBack: no output is like an input.
    """
    names = list(inputs) if isinstance(inputs, Mapping) else None
    given = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    given = list(given) if isinstance(given, tuple | list) else [given]
    returned = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    candidates = [returned, *(reversed(returned) if isinstance(returned, tuple | list) else ())]
    for place in reversed(range(len(given))):
        state = next((found for found in candidates if _alike(found, given[place])), None)
        if state is not None:
            given[place] = state
            return dict(zip(names, given, strict=True)) if names is not None else tuple(given)
    raise NothingFedBack(
        "--steps: no output of the model is like one of its inputs",
        hint=f"say what is fed back: define {NEXT_INPUTS} in the model file, or pass next_inputs=",
    )


def _alike(output: Any, given: Any) -> bool:
    """Return whether an output could be an input: the same structure of floating-point tensors."""
    leaves, spec = pytree.tree_flatten(output)
    others, wanted = pytree.tree_flatten(given)
    return spec == wanted and all(
        isinstance(one, torch.Tensor)
        and isinstance(other, torch.Tensor)
        and one.shape == other.shape
        and inexact(one)
        and inexact(other)
        for one, other in zip(leaves, others, strict=True)
    )
