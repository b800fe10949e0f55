"""Extracts the facts that rules depend on from an op call."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.core.sites import SiteId
from ampaudit.policy import Measurement, OpFacts
from ampaudit.policy.matching import class_names
from ampaudit.trace.entry import layer_path
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.opnames import base_name, named_arguments, op_name
from ampaudit.trace.values import dtype_name, sizes_vary

__all__ = ["FactFinder", "reduction_depth"]


class FactFinder:
    """Extracts ``OpFacts`` from the calls of one trace.

    Args:
        model: The traced module, with its layers and parameters.
        dtype: Name of the 16-bit format.
        measured: Measurements of a run, by site; empty before the first run.
        rounded: Names of parameters and buffers whose values are rounded to 16 bits.
    """

    def __init__(
        self,
        model: nn.Module,
        dtype: str,
        measured: Mapping[SiteId, Measurement],
        rounded: frozenset[str] = frozenset(),
    ) -> None:
        self._rounded = rounded
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
        """Return the facts about a call in a layer whose class is named ``kind``."""
        arguments = named_arguments(op, args, kwargs)
        module = self._modules.get(layer)
        return OpFacts(
            op=op_name(op),
            layer=layer,
            dtype=self._dtype,
            site=site,
            classes=(kind,)
            if module is None or isinstance(module, torch.fx.GraphModule)
            else class_names(type(module)),
            module=module,
            parameters=self._parameters(args, kwargs),
            arguments={
                name: dtype_name(value) if isinstance(value, torch.dtype) else value
                for name, value in arguments.items()
                if _is_plain(value)
            },
            depth=reduction_depth(op, arguments),
            measurement=self._measured.get(site),
        )

    def is_rounded(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor is a parameter or buffer whose values are rounded to 16 bits."""
        return bool(self._rounded) and self._name_of(tensor) in self._rounded

    def _parameters(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[str, ...]:
        leaves = pytree.tree_leaves((args, kwargs))
        names = (self._name_of(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor))
        return tuple(name for name in names if name is not None)

    def _name_of(self, tensor: torch.Tensor) -> str | None:
        if self._names is None:
            # the tracer has put its own tensors into the modules by now
            self._names = {id(t): layer_path(name) for name, t in named_tensors(self._model).items()}
        return self._names.get(id(tensor))


def _is_plain(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return all(_is_plain(item) for item in value)
    return value is None or isinstance(value, bool | int | float | str | torch.dtype)


Arguments = Mapping[str, Any]


def reduction_depth(op: OpOverload, arguments: Arguments) -> int | None:
    """Count the terms that an op sums for one output element; ``None`` if it sums none.

    Reduced axes count as their product: the mean of a 512 x 512 image has depth 262144. A convolution's is
    its fan-in, in_channels / groups times the kernel's volume; attention's the longer of its two sums.

    Args:
        op: The ATen op.
        arguments: Arguments of the call by schema name.
    """
    rule = _RULES.get(base_name(op))
    if rule is None or any(sizes_vary(leaf) for leaf in pytree.tree_leaves(arguments)):
        return None
    try:
        return rule(arguments)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None  # an unusual form of the op, such as nested tensors


def _size(name: str, axis: int) -> Callable[[Arguments], int]:
    return lambda arguments: int(arguments[name].shape[axis])


def _reduced(arguments: Arguments) -> int:
    value: torch.Tensor = arguments.get("self", arguments.get("input"))
    axes = arguments.get("dim")
    if axes is None or axes == []:
        return value.numel()
    dims = axes if isinstance(axes, Sequence) else [axes]
    return math.prod(int(value.shape[axis]) for axis in dims)


def _convolution(arguments: Arguments) -> int:
    if arguments.get("transposed"):
        return _transposed_convolution(arguments)
    weight = arguments["weight"].shape
    return int(math.prod(weight[1:]))


def _transposed_convolution(arguments: Arguments) -> int:
    weight = arguments["weight"].shape
    return int(math.prod(weight)) // int(weight[1]) // int(arguments.get("groups", 1))


def _attention(arguments: Arguments) -> int:
    return max(int(arguments["query"].shape[-1]), int(arguments["key"].shape[-2]))


def _einsum(arguments: Arguments) -> int:
    terms, _, result = arguments["equation"].replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for letters, tensor in zip(terms.split(","), arguments["tensors"], strict=True):
        if "." in letters:
            raise KeyError("an ellipsis")
        sizes |= dict(zip(letters, (int(n) for n in tensor.shape), strict=True))
    output_letters = result or "".join(c for c in sizes if terms.count(c) == 1)
    return math.prod(size for letter, size in sizes.items() if letter not in output_letters)


def _normalized(arguments: Arguments) -> int:
    return math.prod(int(n) for n in arguments["normalized_shape"])


def _group(arguments: Arguments) -> int:
    value = arguments["input"]
    return int(value.numel() // value.shape[0] // arguments["num_groups"])


def _pool(arguments: Arguments) -> int:
    kernel = arguments["kernel_size"]
    dims = len(arguments["self"].shape) - 2
    return math.prod(kernel) if len(kernel) > 1 else int(kernel[0]) ** dims


def _adaptive(arguments: Arguments) -> int:
    value, target = arguments["self"], arguments["output_size"]
    pairs = zip(value.shape[-len(target) :], target, strict=True)
    return math.prod(-(-int(size) // int(out)) for size, out in pairs)


_RULES: dict[str, Callable[[Arguments], int]] = {
    "linear": _size("input", -1),
    "addmm": _size("mat1", -1),
    "addmv": _size("mat", -1),
    "baddbmm": _size("batch1", -1),
    "addbmm": lambda named: int(named["batch1"].shape[0] * named["batch1"].shape[-1]),
    "einsum": _einsum,
    "scaled_dot_product_attention": _attention,
    "group_norm": _group,
    **dict.fromkeys("mm mv matmul bmm dot vdot".split(), _size("self", -1)),
    **dict.fromkeys("conv1d conv2d conv3d convolution _convolution".split(), _convolution),
    **dict.fromkeys("conv_transpose1d conv_transpose2d conv_transpose3d".split(), _transposed_convolution),
    **dict.fromkeys("sum nansum mean prod var std var_mean std_mean logsumexp norm".split(), _reduced),
    **dict.fromkeys("linalg_vector_norm softmax log_softmax _softmax _log_softmax".split(), _reduced),
    **dict.fromkeys("cumsum cumprod".split(), _reduced),
    **dict.fromkeys("layer_norm rms_norm native_layer_norm".split(), _normalized),
    **dict.fromkeys("avg_pool1d avg_pool2d avg_pool3d".split(), _pool),
    **dict.fromkeys("adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d".split(), _adaptive),
}
