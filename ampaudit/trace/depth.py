"""How many terms an op adds up for one element of its output."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from ampaudit.trace.opnames import base_name
from ampaudit.trace.sizes import sizes_vary

__all__ = ["reduction_depth"]

Named = Mapping[str, Any]


def reduction_depth(op: OpOverload, named: Named) -> int | None:
    """The depth of a reduction, ``None`` for an op that reduces nothing or whose depth is not known here.

    Reduced axes count as their product: the mean of a 512 x 512 image has depth 262144. A convolution's is
    its fan-in, in_channels / groups times the kernel's volume; attention's the longer of its two sums.

    Args:
        op: the ATen op.
        named: its arguments by schema name.
    """
    rule = _RULES.get(base_name(op))
    if rule is None:
        return None
    if any(sizes_vary(leaf) for leaf in pytree.tree_leaves(named)):
        return None
    try:
        return rule(named)
    except (KeyError, IndexError, TypeError, ValueError, AttributeError):
        return None  # an unusual form of the op, such as nested tensors


def _size(name: str, axis: int) -> Callable[[Named], int]:
    return lambda named: int(named[name].shape[axis])


def _reduced(named: Named) -> int:
    value: torch.Tensor = named.get("self", named.get("input"))
    axes = named.get("dim")
    if axes is None or axes == []:
        return value.numel()
    chosen = axes if isinstance(axes, Sequence) else [axes]
    return math.prod(int(value.shape[axis]) for axis in chosen)


def _convolution(named: Named) -> int:
    if named.get("transposed"):
        return _transposed_convolution(named)
    weight = named["weight"].shape
    return int(math.prod(weight[1:]))


def _transposed_convolution(named: Named) -> int:
    weight = named["weight"].shape
    return int(math.prod(weight)) // int(weight[1]) // int(named.get("groups", 1))


def _attention(named: Named) -> int:
    return max(int(named["query"].shape[-1]), int(named["key"].shape[-2]))


def _einsum(named: Named) -> int:
    terms, _, result = named["equation"].replace(" ", "").partition("->")
    sizes: dict[str, int] = {}
    for letters, tensor in zip(terms.split(","), named["tensors"], strict=True):
        if "." in letters:
            raise KeyError("an ellipsis")
        sizes |= dict(zip(letters, (int(n) for n in tensor.shape), strict=True))
    kept = result or "".join(c for c in sizes if terms.count(c) == 1)
    return math.prod(size for letter, size in sizes.items() if letter not in kept)


def _normalized(named: Named) -> int:
    return math.prod(int(n) for n in named["normalized_shape"])


def _group(named: Named) -> int:
    value = named["input"]
    return int(value.numel() // value.shape[0] // named["num_groups"])


def _pool(named: Named) -> int:
    kernel = named["kernel_size"]
    dims = len(named["self"].shape) - 2
    return math.prod(kernel) if len(kernel) > 1 else int(kernel[0]) ** dims


def _adaptive(named: Named) -> int:
    value, target = named["self"], named["output_size"]
    pairs = zip(value.shape[-len(target) :], target, strict=True)
    return math.prod(-(-int(size) // int(out)) for size, out in pairs)


_RULES: dict[str, Callable[[Named], int]] = {
    "linear": _size("input", -1),
    "addmm": _size("mat1", -1),
    "addmv": _size("mat", -1),
    "mm": _size("self", -1),
    "mv": _size("self", -1),
    "matmul": _size("self", -1),
    "bmm": _size("self", -1),
    "baddbmm": _size("batch1", -1),
    "addbmm": lambda named: int(named["batch1"].shape[0] * named["batch1"].shape[-1]),
    "dot": _size("self", -1),
    "vdot": _size("self", -1),
    "einsum": _einsum,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d", "convolution", "_convolution"), _convolution),
    **dict.fromkeys(("conv_transpose1d", "conv_transpose2d", "conv_transpose3d"), _transposed_convolution),
    "scaled_dot_product_attention": _attention,
    **dict.fromkeys(
        (
            *("sum", "nansum", "mean", "prod", "var", "std", "var_mean", "std_mean", "logsumexp", "norm"),
            *(
                "linalg_vector_norm",
                "softmax",
                "log_softmax",
                "_softmax",
                "_log_softmax",
                "cumsum",
                "cumprod",
            ),
        ),
        _reduced,
    ),
    **dict.fromkeys(("layer_norm", "rms_norm", "native_layer_norm"), _normalized),
    "group_norm": _group,
    **dict.fromkeys(("avg_pool1d", "avg_pool2d", "avg_pool3d"), _pool),
    **dict.fromkeys(("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"), _adaptive),
}
