"""Builds plain layers from those of torch.ao's eager-mode quantization, dynamic and static."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn

__all__ = ["plain_torch_ao", "rebased"]

_PACKAGES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
# layers that compute on floats with the same attributes
_SAME = {
    *("BatchNorm2d", "BatchNorm3d", "Dropout", "ELU", "GroupNorm", "Hardswish", "LayerNorm", "LeakyReLU"),
    *("InstanceNorm1d", "InstanceNorm2d", "InstanceNorm3d", "Sigmoid", "Softmax"),
}
_CELLS = ("input_size", "hidden_size", "bias")
_LAYERS = (*_CELLS, "num_layers", "batch_first", "dropout", "bidirectional")
_SHARED_SETTINGS = ("in_channels", "out_channels", "kernel_size", "stride", "padding", "dilation", "groups")
_SETTINGS = {
    "EmbeddingBag": ("num_embeddings", "embedding_dim", "mode", "include_last_offset"),
    "Embedding": ("num_embeddings", "embedding_dim"),
    "Linear": ("in_features", "out_features"),
    **{f"{name}{n}d": _SHARED_SETTINGS for name in ("Conv", "ConvTranspose") for n in (1, 2, 3)},
    **dict.fromkeys(("LSTM", "GRU"), _LAYERS),
    **dict.fromkeys(("LSTMCell", "GRUCell", "RNNCell"), _CELLS),
}


def rebased(module: nn.Module) -> type[nn.Module] | None:
    """Return the class whose forward does the same in floats, with the same attributes, if there is one."""
    own = type(module)
    if not own.__module__.startswith(_PACKAGES):
        return None
    if own.__name__ in _SAME:
        found: type[nn.Module] = getattr(nn, own.__name__)
        return found
    if own.__name__ in ("LSTM", "MultiheadAttention") and "dynamic" not in own.__module__:
        return own.__mro__[1]
    return None


def plain_torch_ao(module: Any, base: type) -> tuple[str, nn.Module] | None:
    """Return the format of a quantized layer, and a float one in its place; ``None`` for other layers.

    Raises:
        ValueError: it is of a kind that has no float layer here.
    """
    if (
        not base.__module__.startswith(_PACKAGES)
        or "forward" not in vars(base)
        or rebased(module) is not None
    ):
        return None
    name, where = base.__name__, "dynamically" if "dynamic" in base.__module__ else "statically"
    kind = f"{where} quantized torch.ao"
    if name in ("Quantize", "DeQuantize"):
        return kind, nn.Identity()
    if name in ("QFunctional", "FloatFunctional", "FXFloatFunctional"):
        return (kind, nn.quantized.FloatFunctional()) if name == "QFunctional" else None
    if name == "ReLU6":
        return kind, nn.ReLU6(module.inplace)
    if name == "PReLU":
        made = nn.PReLU(module.num_parameters)
        made.weight = _parameter(module.weight)
        return kind, made
    activation = _ACTIVATIONS.get(name)
    if activation is not None:
        return kind, nn.Sequential(_weighted(module, activation[0]), activation[1](module))
    if name not in _SETTINGS:
        raise ValueError("no plain layer does the same")
    return kind, _weighted(module, name)


_ACTIVATIONS: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "LinearReLU": ("Linear", lambda module: nn.ReLU()),
    "LinearLeakyReLU": ("Linear", lambda module: nn.LeakyReLU(module.negative_slope)),
    "LinearTanh": ("Linear", lambda module: nn.Tanh()),
    **{f"ConvReLU{n}d": (f"Conv{n}d", lambda module: nn.ReLU()) for n in (1, 2, 3)},
}


def _weighted(module: Any, name: str) -> nn.Module:
    """Return a float layer with the settings, weights and biases of a quantized one."""
    settings = {setting: getattr(module, setting) for setting in _SETTINGS[name]}
    weights = {} if not hasattr(module, "get_weight") else {**module.get_weight(), **module.get_bias()}
    if not weights:
        weights = {"weight": module.weight(), "bias": module.bias() if hasattr(module, "bias") else None}
        settings |= {"bias": weights["bias"] is not None} if hasattr(module, "bias") else {}
    if "Transpose" in name:
        settings["output_padding"] = module.output_padding
    if "Conv" in name:
        settings["padding_mode"] = module.padding_mode
    made: nn.Module = getattr(nn, name)(**settings, device="meta")
    for own, tensor in weights.items():
        if tensor is not None:
            setattr(made, own, _parameter(tensor))
    if isinstance(made, nn.RNNBase):
        made._init_flat_weights()
    return made


def _parameter(tensor: Tensor) -> nn.Parameter:
    plain = tensor.dequantize() if tensor.is_quantized else tensor
    return nn.Parameter(plain.detach().float().contiguous(), requires_grad=False)
