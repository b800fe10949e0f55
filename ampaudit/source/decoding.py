"""The built-in step of Hugging Face's generating models: greedy decoding with a cache of fixed size."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from ampaudit.core.errors import InputError, UsageError
from ampaudit.source.interface import Batch

__all__ = ["decoding", "generates"]

_NEXT_INPUTS = "define next_inputs(outputs, inputs) in the model file, or pass next_inputs="
_DECODER_ONLY = ("labels", "use_cache", "past_key_values", "position_ids", "token_type_ids", "logits_to_keep")

_KEPT = ("attention_mask", "use_cache")


def generates(model: nn.Module) -> bool:
    """Return whether a model is one of Transformers that has ``generate()``."""
    can = getattr(model, "can_generate", None)
    return callable(can) and hasattr(model, "generation_config") and bool(can())


def decoding(
    model: Any, batches: Sequence[Batch], steps: int
) -> tuple[tuple[Batch, ...], Callable[[Any, Any], Any]]:
    """Return the first calls of greedy decoding, and the function that makes the later ones.

    The first step takes the whole prompt, and every later one a token. The cache has room for all of them
    from the start, so that no shape changes after the first step.

    Raises:
        UsageError: the model has another kind of cache.
        InputError: a batch is no prompt.
    """
    if getattr(model, "_is_stateful", False):
        raise UsageError(f"--steps: {type(model).__name__} has a cache of its own kind", hint=_NEXT_INPUTS)
    first, function = (
        (_first_of_decoder, _next_of_decoder)
        if model.config.is_encoder_decoder
        else (_first_of_causal, _next_of_causal)
    )
    return tuple(first(model, _named(model, batch), steps) for batch in batches), function


def _named(model: nn.Module, batch: Batch) -> dict[str, Any]:
    """Return a batch's inputs by name."""
    try:
        bound = inspect.signature(model.forward).bind(*batch.args, **batch.kwargs).arguments
    except TypeError as error:
        raise InputError(f"--steps: the inputs do not fit the model: {error}") from error
    extra = bound.pop("kwargs", {})
    given = {**bound, **extra}
    return {name: value for name, value in given.items() if value is not None and name not in _DECODER_ONLY}


@cache
def _layer_class() -> Any:
    """Return the class of a cache's layers, whose tensors are of one size from the first step on."""
    from transformers.cache_utils import StaticLayer

    class FixedLayer(StaticLayer):
        """Holds keys and values in their own dtypes each, as a cache that grows does."""

        def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
            super().lazy_initialization(key_states, value_states)
            if self.values is not None:
                self.values = self.values.to(value_states.dtype)

    return FixedLayer


def _static_cache(model: Any, length: int) -> Any:
    """Return an empty cache with room for all tokens; its tensors are made by the first step."""
    from transformers.cache_utils import StaticCache, StaticLayer, StaticSlidingWindowLayer

    made = StaticCache(config=model.config, max_cache_len=length)
    for index, layer in enumerate(made.layers):
        if type(layer) in (StaticLayer, StaticSlidingWindowLayer):  # the latter counts tokens in Python
            made.layers[index] = _layer_class()(max_cache_len=length)
    return made


def _first_of_causal(model: Any, given: dict[str, Any], steps: int) -> Batch:
    ids = given.get("input_ids")
    if ids is None or ids.ndim != 2:
        raise InputError("--steps: decoding starts from input_ids of two dimensions", hint=_NEXT_INPUTS)
    length, mask = ids.shape[1] + steps, given.get("attention_mask")
    if mask is not None and mask.ndim == 2 and not bool(mask[:, -1].all()):
        order = mask.bool().int().argsort(dim=1, stable=True)  # padding to the left, as generate() wants it
        given = {**given, "input_ids": (ids := ids.gather(1, order)), "attention_mask": mask.gather(1, order)}
        mask = given["attention_mask"]
    made = {**given, "past_key_values": _static_cache(model, length), "use_cache": True}
    known = inspect.signature(model.forward).parameters
    if "position_ids" in known and not any("pixel" in name or "image" in name for name in given):
        positions = (torch.ones_like(ids) if mask is None else mask.long()).cumsum(-1) - 1
        made["position_ids"] = positions.clamp(min=0)
    if mask is not None and mask.ndim == 2:  # what is not there yet is masked by its position
        made["attention_mask"] = torch.cat([mask, mask.new_ones(mask.shape[0], steps)], dim=1)
    return Batch((), made)


def _next_of_causal(outputs: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    kept = {name: value for name, value in inputs.items() if name in _KEPT}
    if "position_ids" in inputs:
        kept["position_ids"] = inputs["position_ids"][:, -1:] + 1
    return {
        **dict.fromkeys(inputs),
        **kept,
        "input_ids": outputs.logits[:, -1:].argmax(-1),
        "past_key_values": outputs.past_key_values,
    }


def _first_of_decoder(model: Any, given: dict[str, Any], steps: int) -> Batch:
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    ids = given.get("decoder_input_ids")
    if ids is None:
        start = model.generation_config.decoder_start_token_id
        start = model.config.decoder_start_token_id if start is None else start
        if start is None:
            raise InputError(
                "--steps: the model's configuration has no decoder_start_token_id",
                hint="give decoder_input_ids with the other inputs",
            )
        rows = next(value.shape[0] for value in given.values() if isinstance(value, torch.Tensor))
        ids = torch.full((rows, 1), start)
    room = EncoderDecoderCache(_static_cache(model, ids.shape[1] + steps), DynamicCache())
    return Batch((), {**given, "decoder_input_ids": ids, "past_key_values": room, "use_cache": True})


def _next_of_decoder(outputs: Any, inputs: dict[str, Any]) -> dict[str, Any]:
    from transformers.modeling_outputs import BaseModelOutput

    kept = {name: value for name, value in inputs.items() if name in _KEPT}
    return {
        **dict.fromkeys(inputs),
        **kept,
        "encoder_outputs": BaseModelOutput(last_hidden_state=outputs.encoder_last_hidden_state),
        "decoder_input_ids": outputs.logits[:, -1:].argmax(-1),
        "past_key_values": outputs.past_key_values,
    }
