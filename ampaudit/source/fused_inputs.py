"""Adds images and audio to text batches, for models that replace placeholder tokens by features."""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from ampaudit.core.errors import InputError
from ampaudit.source.random_inputs import (
    AUDIO_TOKENS,
    IMAGE_TOKENS,
    check_sizes,
    first_setting,
    input_sizes,
    longest_text,
    part_with,
)
from ampaudit.trace.opnames import written_values
from ampaudit.trace.structure import structural_copy

__all__ = ["Fusion", "MetaRun", "ValuesNeeded", "find_fusions", "fuse", "meta_copy"]

_VALUES = (torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape)
_aten = torch.ops.aten
_USUAL = 224  # pixels; some models take images of any size up to a large one
_MAX_TILES = 5  # of an image: 2 x 2 and the whole
_SIDE = 12  # patches; divisible by merge factors 2, 3 and 4
_PATCHES = {"image_grid_thw", "image_grid_hw", "image_position_ids", "spatial_shapes"}


@dataclass(frozen=True, slots=True)
class Fusion:
    """Random inputs of a modality, and the placeholders for their features.

    Attributes:
        name: Name of the main input.
        sizes: Shape of the main input; empty if the batches contain it.
        others: Further inputs.
        token: Placeholder token id.
        kind: Value of the placeholders in ``mm_token_type_ids``.
        longest: Maximum number of tokens in a row.
        count: Number of placeholders in each row.
    """

    name: str
    sizes: tuple[int, ...]
    others: Mapping[str, Tensor]
    token: int
    kind: int
    longest: int | None
    count: int = 0


_Layouts = Iterator[tuple[tuple[int, ...], dict[str, Tensor]]]  # sizes of the main input, and other inputs


@dataclass(frozen=True, slots=True)
class _Modality:
    """The names that Transformers uses for a modality.

    Attributes:
        name: Name of the main input.
        tokens: Settings that may hold the placeholder.
        method: Name of the method that returns features.
        kind: See ``Fusion``.
        layouts: Candidate inputs for a model, its input names and a number of rows; usual ones first.
    """

    name: str
    tokens: tuple[str, ...]
    method: str
    kind: int
    layouts: Callable[[Any, Collection[str], int], _Layouts]


def find_fusions(model: Any, batch: Mapping[str, Tensor]) -> list[Fusion]:
    """Return the modalities that can be added to batches like this one.

    Configurations do not say how many placeholders an image takes. So a copy of the model without weights
    computes the features, counts them, and runs until they are merged into the text embeddings.
    """
    parameters, additions = inspect.signature(model.forward).parameters.keys(), list[Fusion]()
    for modality in _MODALITIES:
        token = first_setting(model.config, modality.tokens, None)
        applicable = type(token) is int and modality.name in parameters and "input_ids" in batch
        if applicable and not bool((batch["input_ids"] == token).any()):
            fusion = _accepted_fusion(meta_copy(model), modality, token, batch)
            if fusion is not None:
                additions.append(fusion)
                batch = fuse(batch, fusion)
    return additions


def fuse(batch: Mapping[str, Tensor], fusion: Fusion) -> dict[str, Tensor]:
    """Add the inputs of a modality to a batch, and its placeholders before the text."""
    tensors = {**batch, **fusion.others}
    if fusion.sizes:
        tensors[fusion.name] = torch.randn(fusion.sizes)
    firsts = {"attention_mask": 1, "input_ids": fusion.token, "mm_token_type_ids": fusion.kind}
    for name, first in {**firsts, "token_type_ids": 0}.items():
        if name in tensors:
            placeholders = tensors[name].new_full((len(tensors[name]), fusion.count), first)
            tensors[name] = torch.cat([placeholders, tensors[name]], 1)[:, : fusion.longest]
    return tensors


def _accepted_fusion(
    model: nn.Module, modality: _Modality, token: int, batch: Mapping[str, Tensor]
) -> Fusion | None:
    """Return the first layout that a model without weights accepts."""
    parameters, method = inspect.signature(model.forward).parameters.keys(), _method(model, modality)
    names = parameters if method is None else inspect.signature(method).parameters.keys()
    layouts: _Layouts = iter([((), {})])
    if modality.name not in batch:
        layouts = modality.layouts(model, names, len(batch["input_ids"]))
    with contextlib.suppress(InputError):  # absurd sizes in a configuration
        longest = longest_text(model.config)
        for sizes, others in layouts:
            accepted = {name: tensor for name, tensor in others.items() if name in names}
            if "mm_token_type_ids" in parameters and "mm_token_type_ids" not in batch:
                accepted["mm_token_type_ids"] = torch.zeros_like(batch["input_ids"])
            fusion = Fusion(modality.name, sizes, accepted, token, modality.kind, longest)
            with contextlib.suppress(Exception):  # models reject inputs in many ways
                return _with_token_count(model, method, names, batch, fusion)
    return None


def _method(model: nn.Module, modality: _Modality) -> Callable[..., Any] | None:
    """Return the method of the model or a submodule that computes features."""
    methods = (getattr(module, modality.method, None) for module in model.modules())
    return next((m for m in methods if m and modality.name in inspect.signature(m).parameters), None)


def _with_token_count(
    model: nn.Module,
    method: Callable[..., Any] | None,
    names: Collection[str],
    batch: Mapping[str, Tensor],
    fusion: Fusion,
) -> Fusion:
    """Set the number of placeholders of a fusion; raises whatever the model raises if it does not fit."""
    with MetaRun(), torch.no_grad():
        if method is not None:
            arguments = {name: tensor for name, tensor in fuse(batch, fusion).items() if name in names}
            total = _feature_count(method(**arguments))
            fusion = replace(fusion, count=total // len(batch["input_ids"]))
        complete = fuse(batch, fusion)
        with contextlib.suppress(_EmbeddingsReached), _stop_at_embeddings(model, complete["input_ids"].shape):
            model(**complete)
    return fusion


class _EmbeddingsReached(Exception):
    """Raised when the language model is called with the merged embeddings, which it is known to accept."""


@contextlib.contextmanager
def _stop_at_embeddings(model: nn.Module, sizes: torch.Size) -> Iterator[None]:
    """Raise ``_EmbeddingsReached`` before a submodule is called with embeddings of all tokens."""

    def stop(module: nn.Module, args: Any, kwargs: Mapping[str, Any]) -> None:
        embeddings = kwargs.get("inputs_embeds")
        if embeddings is not None and embeddings.shape[:2] == sizes:
            raise _EmbeddingsReached

    hooks = [module.register_forward_pre_hook(stop, with_kwargs=True) for module in model.modules()]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _feature_count(features: Any) -> int:
    """Return the number of features in a tensor, or in a list with a tensor per image."""
    if not isinstance(features, Tensor | list | tuple):
        features = first_setting(features, ("pooler_output", "last_hidden_state"), ())
    tensors = [features] if isinstance(features, Tensor) else features
    return sum(math.prod(tensor.shape[:-1]) for tensor in tensors)


def _pictures(model: Any, names: Collection[str], rows: int) -> _Layouts:
    """Yield images as patches with positions, as a whole, or in tiles."""
    vision = part_with(model.config, ("vision_config",), "patch_size")
    *_, channels, height, width = input_sizes(model, "pixel_values", rows)
    if _PATCHES & set(names):
        yield from _patches(vision, channels, rows)
        return
    for h, w in dict.fromkeys([(min(height, _USUAL), min(width, _USUAL)), (height, width)]):
        others = {"image_sizes": torch.tensor([[h, w]] * rows)}
        yield (rows, channels, h, w), others
        for tiles in range(1, _MAX_TILES + 1):
            yield (rows, tiles, channels, h, w), others
        most = first_setting(vision, ("max_num_tiles",), 1)
        sizes = check_sizes("pixel_values", rows, 1, most, channels, h, w)
        ratios = {"aspect_ratio_ids": torch.ones(rows, 1), "aspect_ratio_mask": torch.ones(rows, 1, most)}
        yield sizes, {name: tensor.long() for name, tensor in ratios.items()}


def _patches(vision: Any, channels: int, rows: int) -> _Layouts:
    patch, frames = (first_setting(vision, (name,), 1) for name in ("patch_size", "temporal_patch_size"))
    (*_, height, width), number = check_sizes("pixel_values", frames, channels, patch, patch), _SIDE * _SIDE
    size = channels * height * width
    places = torch.cartesian_prod(torch.arange(_SIDE), torch.arange(_SIDE))
    others = {
        "image_grid_thw": torch.tensor([[1, _SIDE, _SIDE]] * rows),
        "image_grid_hw": torch.tensor([[_SIDE, _SIDE]] * rows),
        "image_position_ids": places.repeat(rows, 1, 1),
        "pixel_attention_mask": torch.ones(rows, number, dtype=torch.long),
        "spatial_shapes": torch.tensor([[_SIDE, _SIDE]] * rows),
    }
    yield (rows * number, frames * size), others
    yield (rows * number, channels, height, width), others
    yield (rows, number, size), others


def _spectrograms(model: Any, names: Collection[str], rows: int) -> _Layouts:
    sizes = input_sizes(model, "input_features", rows)
    yield sizes, {}
    mask = torch.ones(rows, sizes[-1], dtype=torch.long)
    yield sizes, {"feature_attention_mask": mask, "input_features_mask": mask}


_MODALITIES = (
    _Modality("pixel_values", IMAGE_TOKENS, "get_image_features", 1, _pictures),
    _Modality("input_features", AUDIO_TOKENS, "get_audio_features", 3, _spectrograms),
)


class ValuesNeeded(Exception):
    """Raised when code depends on values computed from weights."""


def meta_copy(model: nn.Module) -> nn.Module:
    """Return a copy whose parameters and buffers are on the ``meta`` device."""
    replace: dict[int, Tensor] = {id(b): b.to("meta") for b in model.buffers()}
    for parameter in model.parameters():
        replace[id(parameter)] = nn.Parameter(parameter.detach().to("meta"), requires_grad=False)
    return structural_copy(model, replace).eval()


class MetaRun(TorchDispatchMode):
    """Computes ops on CPU tensors, and only shapes where a ``meta`` tensor takes part.

    Code that reads the number of patches, token positions or a mask thus runs.
    """

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        tensors = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if not any(tensor.is_meta for tensor in tensors):
            if kwargs.get("device") == torch.device("meta") and func is not _aten.empty.memory_format:
                kwargs = kwargs | {"device": "cpu"}
            return func(*args, **kwargs)
        dynamic = any(tag in func.tags for tag in _VALUES)
        if func is _aten.index.Tensor:
            indices = [part for index in args[1] for part in _as_indices(index)]
            args = (args[0], indices)
            dynamic = any(index is not None and index.dtype in (torch.bool, torch.uint8) for index in indices)
        mutated = written_values(func, args, kwargs)
        if dynamic or any(isinstance(value, Tensor) and not value.is_meta for value in mutated):
            raise ValuesNeeded(str(func))
        if func is _aten.embedding.default and not args[1].is_meta:
            table, rows = args[:2]
            if rows.numel() and not 0 <= int(rows.min()) <= int(rows.max()) < len(
                table
            ):  # as the real kernel
                raise IndexError(f"row {int(rows.max())} of an embedding with {len(table)}")
        args, kwargs = pytree.tree_map_only(Tensor, lambda tensor: tensor.to("meta"), (args, kwargs))
        if "device" in kwargs:
            kwargs["device"] = torch.device("meta")
        return func(*args, **kwargs)


def _as_indices(index: Tensor | None) -> tuple[Tensor | None, ...]:
    """Convert a mask with known values to indices per axis; return other indices unchanged."""
    if index is None or index.is_meta or index.dtype not in (torch.bool, torch.uint8):
        return (index,)
    return index.nonzero().unbind(1)
