"""Computes the inputs of the next step from a step's outputs, by the user's function or a built-in one."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.text import is_number
from ampaudit.source.interface import Batch
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.entry import flatten_outputs, named_inputs, restored, with_objects_open
from ampaudit.trace.values import inexact

_DEFINE_HINT = "define next_inputs(outputs, inputs) in the model file, or pass next_inputs="
_DECODER_ONLY = ("labels", "use_cache", "past_key_values", "position_ids", "token_type_ids", "logits_to_keep")

_UNCHANGED = ("attention_mask", "use_cache")
_TIMESTEP_NAMES = ("timestep", "timesteps", "t", "time", "sigma", "sigmas")
NEXT_INPUTS = "next_inputs(outputs, inputs)"
_HINT = "return the inputs of the next step as example_inputs() does: a tensor, a tuple or a dict"
NextInputs = Callable[[Any, Any], Any]


class NothingFedBack(UsageError):
    """Raised by ``recurrent`` if no output matches an input."""


def stepping(
    model: nn.Module, batches: Sequence[Batch], declared: Any, steps: int
) -> tuple[tuple[Batch, ...], NextInputs, str]:
    """Return the batches of the first step, the function for later inputs, and its description.

    ``declared`` is the user's function or diffusion scheduler; ``None`` selects a built-in function.

    Raises:
        UsageError: ``declared`` is neither, or cannot provide that many steps.
    """
    if callable(getattr(declared, "step", None)) and hasattr(declared, "timesteps"):  # as in Diffusers
        first = tuple(DiffusionSteps(declared).first(batch, steps) for batch in batches)
        return first, DiffusionSteps(declared), f"the sample, by {type(declared).__name__}"
    if callable(declared):
        return tuple(batches), declared, NEXT_INPUTS
    if declared is not None:
        raise UsageError(
            f"next_inputs is of type {type(declared).__name__}",
            hint=f"declare a function {NEXT_INPUTS}, or a scheduler with step() and timesteps",
        )
    can_generate = getattr(model, "can_generate", None)  # a model of Transformers
    if callable(can_generate) and hasattr(model, "generation_config") and can_generate():
        return *plan_decoding(model, batches, steps), "the most likely token and the cache (built in)"
    return tuple(batches), recurrent, "outputs that are like inputs (built in)"


def call_next_inputs(function: NextInputs, outputs: Any, batch: Batch, call: str) -> Batch:
    """Call the function that computes the next inputs, and return them as a batch of plain containers.

    Raises:
        InputError: The function returns no inputs.
        SourceError: The function raises.
    """
    args, kwargs = restored((batch.args, batch.kwargs))
    inputs = Batch(args, kwargs).whole
    with calling_user_code(f"{NEXT_INPUTS} after {call}"):
        result = function(outputs, inputs)
    if isinstance(result, torch.Tensor):
        step = Batch((result,), kwargs if args else {})
    elif isinstance(result, Mapping) and result and all(isinstance(name, str) for name in result):
        step = Batch(args if kwargs else (), {**kwargs, **result})
    elif isinstance(result, tuple | list) and result:
        step = Batch(tuple(result), kwargs if args else {})
    else:
        what = "nothing" if result is None else type(result).__name__
        raise InputError(f"{NEXT_INPUTS} returned {what} after {call}", hint=_HINT)
    step = Batch(*with_objects_open((step.args, step.kwargs)))
    if not any(isinstance(leaf, torch.Tensor) for leaf in pytree.tree_leaves((step.args, step.kwargs))):
        raise InputError(f"{NEXT_INPUTS} returned no tensor after {call}", hint=_HINT)
    return step


def check_next_inputs(model: nn.Module, batch: Batch, call: str) -> None:
    """Check the next inputs against the signature of the model's forward.

    Raises:
        InputError: An argument is missing or unexpected.
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
    """Feed back the state of a recurrent model.

    The last output with the structure and shapes of the last input is the state: ``model(x, state)``
    returns ``state`` or ``(y, state)``. The other inputs stay the same.

    Raises:
        NothingFedBack: No output matches an input.
    """
    names = list(inputs) if isinstance(inputs, Mapping) else None
    values = list(inputs.values()) if isinstance(inputs, Mapping) else inputs
    values = list(values) if isinstance(values, tuple | list) else [values]
    returned = list(outputs.values()) if isinstance(outputs, Mapping) else outputs
    candidates = [returned, *(reversed(returned) if isinstance(returned, tuple | list) else ())]
    for place in reversed(range(len(values))):
        state = next((candidate for candidate in candidates if _alike(candidate, values[place])), None)
        if state is not None:
            values[place] = state
            return dict(zip(names, values, strict=True)) if names is not None else tuple(values)
    raise NothingFedBack(
        "--steps: no output of the model has the structure and shapes of an input", hint=_DEFINE_HINT
    )


def _alike(output: Any, value: Any) -> bool:
    """Return whether an output and an input have the same structure of floating-point tensors."""
    leaves, spec = pytree.tree_flatten(output)
    others, value_spec = pytree.tree_flatten(value)
    if spec != value_spec or not all(isinstance(leaf, torch.Tensor) for leaf in (*leaves, *others)):
        return False
    floats = all(map(inexact, (*leaves, *others)))
    return floats and [leaf.shape for leaf in leaves] == [other.shape for other in others]


def plan_decoding(
    model: Any, batches: Sequence[Batch], steps: int
) -> tuple[tuple[Batch, ...], Callable[[Any, Any], Any]]:
    """Return the first calls of greedy decoding and the function for later ones.

    The first step takes the whole prompt, every later step one token. The cache is allocated in full
    up front, so that no shape changes after the first step.

    Raises:
        UsageError: The model has its own kind of cache.
        InputError: A batch is not a prompt.
    """
    if getattr(model, "_is_stateful", False):
        raise UsageError(f"--steps: {type(model).__name__} has a cache of its own kind", hint=_DEFINE_HINT)
    inputs = [_by_name(model, batch) for batch in batches]
    if model.config.is_encoder_decoder:
        return tuple(_first_of_decoder(model, values, steps) for values in inputs), _next_of_decoder
    return tuple(_first_of_causal(model, values, steps) for values in inputs), _next_of_causal


def _by_name(model: nn.Module, batch: Batch) -> dict[str, Any]:
    try:
        bound = inspect.signature(model.forward).bind(*batch.args, **batch.kwargs).arguments
    except TypeError as error:
        raise InputError(f"--steps: the inputs do not fit the model: {error}") from error
    extra = bound.pop("kwargs", {})
    values = {**bound, **extra}
    return {name: value for name, value in values.items() if value is not None and name not in _DECODER_ONLY}


@cache
def _fixed_layer_class() -> Any:
    """Return a class of cache layers whose tensors have a fixed size."""
    from transformers.cache_utils import StaticLayer

    class FixedLayer(StaticLayer):
        """Stores keys and values in the dtype of each, as a dynamic cache does."""

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            super().lazy_initialization(key_states, value_states)
            if self.values is not None:
                self.values = self.values.to(value_states.dtype)

    return FixedLayer


def _static_cache(model: Any, length: int) -> Any:
    """Return an empty cache with room for all tokens; the first step allocates its tensors."""
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    static_cache = StaticCache(config=model.config, max_cache_len=length)
    for index, layer in enumerate(static_cache.layers):
        if type(layer) in (StaticLayer, StaticSlidingWindowLayer):  # a sliding window counts tokens in Python
            static_cache.layers[index] = _fixed_layer_class()(max_cache_len=length)
    return static_cache


def _first_of_causal(model: Any, inputs: dict[str, Any], steps: int) -> Batch:
    ids = inputs.get("input_ids")
    if ids is None or ids.ndim != 2:
        raise InputError("--steps: decoding starts from input_ids of two dimensions", hint=_DEFINE_HINT)
    length, mask = ids.shape[1] + steps, inputs.get("attention_mask")
    if mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all()):
        order = mask.bool().int().argsort(dim=1, stable=True)  # padding to the left, as generate() wants it
        ids, mask = ids.gather(1, order), mask.gather(1, order)
        inputs = {**inputs, "input_ids": ids, "attention_mask": mask}
    kwargs = {**inputs, "past_key_values": _static_cache(model, length), "use_cache": True}
    parameters = inspect.signature(model.forward).parameters
    if "position_ids" in parameters and not any("pixel" in name or "image" in name for name in inputs):
        positions = (torch.ones_like(ids) if mask is None else mask.long()).cumsum(-1) - 1
        kwargs["position_ids"] = positions.clamp(min=0)
    if mask is not None and mask.ndim == 2:  # positions mask the tokens still to come
        kwargs["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], steps)], dim=1)
    return Batch((), kwargs)


def _next_of_causal(outputs: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    following = _after(outputs, inputs, "input_ids")
    if "position_ids" in inputs:
        following["position_ids"] = inputs["position_ids"][:, -1:] + 1
    return following


def _after(outputs: Any, inputs: dict[str, Any], ids: str) -> dict[str, Any]:
    """Return the next inputs: the most likely token, the cache, and ``None`` for other inputs that change."""
    unchanged = {name: value if name in _UNCHANGED else None for name, value in inputs.items()}
    token = outputs.logits[:, -1:].argmax(-1)
    return {**unchanged, ids: token, "past_key_values": outputs.past_key_values}


def _first_of_decoder(model: Any, inputs: dict[str, Any], steps: int) -> Batch:
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    ids = inputs.get("decoder_input_ids")
    if ids is None:
        start = model.generation_config.decoder_start_token_id
        start = model.config.decoder_start_token_id if start is None else start
        if start is None:
            raise InputError(
                "--steps: the model's configuration has no decoder_start_token_id",
                hint="give decoder_input_ids with the other inputs",
            )
        rows = next(value.shape[0] for value in inputs.values() if isinstance(value, torch.Tensor))
        ids = torch.full((rows, 1), start)
    room = EncoderDecoderCache(_static_cache(model, ids.shape[1] + steps), DynamicCache())
    return Batch((), {**inputs, "decoder_input_ids": ids, "past_key_values": room, "use_cache": True})


def _next_of_decoder(outputs: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    from transformers.modeling_outputs import BaseModelOutput

    encoded = BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state)
    return _after(outputs, inputs, "decoder_input_ids") | {"encoder_outputs": encoded}


class DiffusionSteps:
    """Computes the next sample by ``scheduler.step(output, timestep, sample)``.

    The sample is the first floating-point input with two or more dimensions. The timestep is the input of
    that name, or else the first other input that is a number or a vector.
    """

    def __init__(self, scheduler: Any) -> None:
        self._scheduler = copy.deepcopy(scheduler)  # since it counts its steps
        self._step_count = 0
        self._last_sample: tuple[torch.Tensor, torch.Tensor] | None = None  # scaled and unscaled

    def first(self, batch: Batch, steps: int) -> Batch:
        """Set the first timestep in a batch, and scale its sample.

        Raises:
            InputError: No input is a sample, or none is a timestep.
            UsageError: The scheduler has fewer timesteps than steps.
        """
        available = len(self._scheduler.timesteps)
        if available < steps:
            raise UsageError(
                f"--steps {steps}: the scheduler has {available} timesteps",
                hint=f"call its set_timesteps({steps}), or ask for fewer steps",
            )
        leaves, spec = pytree.tree_flatten((batch.args, batch.kwargs))
        sample, time = _places(batch)
        self._fill(leaves, sample, time, leaves[sample])
        return Batch(*pytree.tree_unflatten(leaves, spec))

    def __call__(self, outputs: Any, inputs: Any) -> Any:
        """Replace the sample and the timestep in the inputs by the next ones."""
        leaves, spec = pytree.tree_flatten(inputs)
        whole = inputs if isinstance(inputs, tuple) else (inputs,)
        batch = Batch((), inputs) if isinstance(inputs, dict) else Batch(whole)
        sample, time = _places(batch)
        output = next(tensor for _, tensor in flatten_outputs(outputs))
        stepped = self._scheduler.step(output, self._timestep, self._unscaled(leaves[sample]))
        following = stepped if isinstance(stepped, torch.Tensor) else getattr(stepped, "prev_sample", None)
        following = stepped[0] if following is None else following
        self._step_count += 1
        self._fill(leaves, sample, time, following)
        return pytree.tree_unflatten(leaves, spec)

    @property
    def _timestep(self) -> torch.Tensor:
        times = self._scheduler.timesteps
        return torch.as_tensor(times[min(self._step_count, len(times) - 1)])

    def _fill(self, leaves: list[Any], sample: int, time: int, unscaled: torch.Tensor) -> None:
        scale = getattr(self._scheduler, "scale_model_input", None)
        scaled = unscaled if scale is None else scale(unscaled, self._timestep)
        self._last_sample = scaled, unscaled
        leaves[sample] = scaled
        shape = leaves[time].shape if isinstance(leaves[time], torch.Tensor) else ()
        leaves[time] = self._timestep.to(unscaled.device).expand(shape).clone()

    def _unscaled(self, value: torch.Tensor) -> torch.Tensor:
        """Return the sample before scaling; an input that has changed since is divided by the scale."""
        if self._last_sample is not None and torch.equal(self._last_sample[0], value):
            return self._last_sample[1]
        scale = getattr(self._scheduler, "scale_model_input", None)
        return value if scale is None else value / scale(torch.ones_like(value), self._timestep)


def _places(batch: Batch) -> tuple[int, int]:
    """Return the leaf indices of the sample and the timestep."""
    leaves = named_inputs(batch.args, batch.kwargs)
    tensors = [(i, leaf) for i, (_, leaf) in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    samples = [i for i, tensor in tensors if tensor.is_floating_point() and tensor.ndim >= 2]
    if not samples:
        raise InputError("no input of the model is a sample", hint="give it floating-point latents")
    times = [i for i, (name, leaf) in enumerate(leaves) if name in _TIMESTEP_NAMES and i != samples[0]]
    times += [i for i, (_, leaf) in enumerate(leaves) if i != samples[0] and _is_time(leaf)]
    if not times:
        raise InputError("no input of the model is a timestep", hint="give it one, such as torch.tensor(0)")
    return samples[0], times[0]


def _is_time(leaf: Any) -> bool:
    if isinstance(leaf, torch.Tensor):
        return leaf.ndim <= 1 and leaf.dtype is not torch.bool
    return is_number(leaf)
