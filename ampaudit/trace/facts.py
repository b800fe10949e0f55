"""Reads off an op call everything that a rule may look at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement, OpFacts
from ampaudit.policy.matching import class_names
from ampaudit.trace.depth import reduction_depth
from ampaudit.trace.entry import layer_path
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.opnames import named_arguments, op_name

__all__ = ["FactFinder"]


class FactFinder:
    """Makes ``OpFacts`` of the calls of one trace.

    Args:
        model: the module that is traced; layers and parameters are looked up in it.
        dtype: name of the 16-bit format.
        measured: what a run saw, by site; empty in the first phase.
    """

    def __init__(self, model: nn.Module, dtype: str, measured: Mapping[SiteId, Measurement]) -> None:
        self._model = model
        self._dtype = dtype
        self._measured = measured
        self._modules = {layer_path(name): module for name, module in model.named_modules()}
        self._names: dict[int, str] | None = None

    def of(
        self,
        op: OpOverload,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        layer: str,
        kind: str,
        site: SiteId,
    ) -> OpFacts:
        """The facts about a call in a layer whose class is named ``kind``."""
        named = named_arguments(op, args, kwargs)
        module = self._modules.get(layer)
        return OpFacts(
            op=op_name(op),
            layer=layer,
            dtype=self._dtype,
            site=site,
            classes=class_names(type(module)) if module is not None and not _is_replayed(module) else (kind,),
            module=module,
            parameters=self._parameters(args, kwargs),
            arguments={name: _plain(value) for name, value in named.items() if _is_plain(value)},
            depth=reduction_depth(op, named),
            measurement=self._measured.get(site),
        )

    def _parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        if self._names is None:
            # the tracer has put its own tensors into the modules by now
            self._names = {id(t): layer_path(name) for name, t in named_tensors(self._model).items()}
        names = self._names
        leaves = pytree.tree_leaves((args, kwargs))
        return tuple(names[id(t)] for t in leaves if isinstance(t, torch.Tensor) and id(t) in names)


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


def _plain(value: Any) -> Any:
    if isinstance(value, torch.dtype):
        return str(value).removeprefix("torch.")
    return value


def _is_replayed(module: nn.Module) -> bool:
    return isinstance(module, torch.fx.GraphModule)
