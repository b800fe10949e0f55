"""Replaces layers with quantized weights by plain layers with float32 weights.

Both runs then compute with the dequantized values, so the audit covers the 16-bit arithmetic around the
quantized layers. Layers are recognized by the names of their class and package; no package is imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.distributed.tensor import DTensor

from ampaudit.core.errors import SourceError
from ampaudit.core.text import plural
from ampaudit.core.untrusted import describe
from ampaudit.source.interface import ModelSource
from ampaudit.trace.fake_model import named_tensors
from ampaudit.trace.internals import FakeTensor
from ampaudit.trace.isolation import structural_copy

_BLOCK = 128  # of fine-grained fp8, unless a layer names its own
_AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)  # AutoAWQ interleaves the values of a word
_TORCH_AO_LAYERS_PACKAGES = ("torch.ao.nn.quantized", "torch.ao.nn.intrinsic.quantized")
# layers that have the same attributes as their float counterparts
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
_HOOKS = (
    *("_forward_hooks", "_forward_hooks_with_kwargs", "_forward_hooks_always_called"),
    *("_forward_pre_hooks", "_forward_pre_hooks_with_kwargs"),
)
_INTEGER_OPS = ("quantize_per_tensor", "quantize_per_channel", "quantize_per_tensor_dynamic")
# tensor subclasses that compute in their own dtype
_PLAIN_TENSORS = (FakeTensor, DTensor)
# GPTQ and AWQ layers that keep the order of the file; the kernels of others reorder weights
_FILE_ORDER = {"TorchLinear", "TorchQuantLinear", "TritonV2Linear", "TritonV2QuantLinear"}
_FILE_ORDER_AWQ = {"AwqTorchLinear", "AwqGEMMLinear", "AwqGEMVLinear", "WQLinear_GEMM", "WQLinear_GEMV"}
# attributes by which Transformers recognizes a quantized model, and rejects its half()
_MARKS = ("is_quantized", "quantization_method", "hf_quantizer", "is_loaded_in_4bit", "is_loaded_in_8bit")
_REORDERING = ("exllama", "marlin", "qigen", "hpu")
_Plain = tuple[str, nn.Module | dict[int, Any]]  # format, and the plain layer or its weights by id


def with_plain_weights(source: ModelSource) -> ModelSource:
    """Dequantize the weights of a source's model to float32.

    The model itself is not changed: a copy shares the other weights.

    Raises:
        SourceError: A layer cannot be dequantized, for example because its kernel reorders the weights.
    """
    model, formats = source.model, Counter[str]()
    replaced: dict[int, Any] = {}
    for path, module in _outermost(model, replaced):
        plain_layer = _plain_layer(module, f"layer {describe(path)}" if path else "the model")
        if plain_layer is not None:
            kind, replacement = plain_layer
            if isinstance(replacement, nn.Module):
                formats[kind] += any(True for _ in replacement.parameters())  # a conversion layer has none
                replacement.train(module.training)
                for name in _HOOKS:
                    setattr(replacement, name, getattr(module, name))
                replaced |= {id(module): replacement, **{id(p): p for p in module.parameters()}}
            else:
                formats[kind] += 1
                replaced |= replacement
    for tensor in named_tensors(model).values():
        plain = None if id(tensor) in replaced else _plain_tensor(tensor)
        if plain is not None:
            formats["torch.quantized" if tensor.is_quantized else type(tensor).__name__] += 1
            is_parameter = isinstance(tensor, nn.Parameter)
            replaced[id(tensor)] = nn.Parameter(plain, tensor.requires_grad) if is_parameter else plain
    if not replaced and not any(map(float_class, model.modules())):
        return source
    shared = {id(tensor): tensor for tensor in named_tensors(model).values()}
    copied = structural_copy(model, {**shared, **replaced})
    for module in copied.modules():
        module.__class__ = float_class(module) or type(module)
        for name in _MARKS:
            vars(module).pop(name, None)
        if type(module).__name__ == "FP8Experts":
            vars(module)["config"]._experts_implementation = "eager"  # other implementations call kernels
    notes = tuple(note_on_dequantized(kind, count) for kind, count in formats.items() if count)
    return replace(source, model=copied, notes=(*source.notes, *notes))


def _outermost(model: nn.Module, replaced: Mapping[int, Any]) -> Iterator[tuple[str, nn.Module]]:
    """Yield modules by name, except those inside a replaced module."""
    inside: str | None = None
    for path, module in model.named_modules():
        if inside is None or not path.startswith(inside):
            yield path, module
            inside = (path and f"{path}.") if id(module) in replaced else None


def note_on_dequantized(kind: str, count: int) -> str:
    """Return a note on dequantized layers and on what the audit does not cover."""
    what = f"{plural(count, 'layer')} with {describe(kind)} weights"
    return f"{what}: dequantized for both runs; what their quantized kernels compute is not audited"


def _plain_tensor(tensor: Tensor) -> Tensor | None:
    """Dequantize a tensor; ``None`` if it is not quantized."""
    inner = getattr(tensor, "original_weight_tensor", tensor)  # torchao, with quantized activations
    dequantizes = getattr(type(inner), "dequantize", Tensor.dequantize) is not Tensor.dequantize
    if isinstance(tensor, _PLAIN_TENSORS) or not (tensor.is_quantized or dequantizes):
        return None
    with torch.no_grad():
        values: Tensor = inner.dequantize()
    return values.detach()


def _plain_layer(module: nn.Module, name: str) -> _Plain | None:
    """Return the format of a quantized layer and its plain layer or weights; ``None`` if it is plain.

    Raises:
        SourceError: The weights cannot be dequantized.
    """
    for base in type(module).__mro__:
        package = base.__module__.partition(".")[0]
        dequantize = _PACKAGES.get(package)
        if dequantize is None:
            continue
        try:
            with torch.no_grad():
                plain = dequantize(module, base)
        except (ValueError, AttributeError, RuntimeError, IndexError) as error:
            raise _layer_error(module, name, f"holds weights that cannot be dequantized: {error}") from error
        if plain is None:
            continue
        defining = next(c for c in type(module).__mro__ if "forward" in vars(c))
        if not issubclass(base, defining):
            raise _layer_error(
                module, name, f"changes the forward of {base.__name__}, whose weights are quantized"
            )
        return plain
    return None


def _layer_error(module: nn.Module, name: str, why: str) -> SourceError:
    return SourceError(
        f"{name} ({describe(type(module).__name__)}) {describe(why, 200)}",
        hint="audit the model as it is before its weights are quantized, or after they are dequantized",
    )


def _linear(weight: Tensor, bias: Any) -> nn.Linear:
    layer = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    layer.weight = nn.Parameter(weight, requires_grad=False)
    if bias is not None:
        layer.bias = nn.Parameter(bias.detach().float(), requires_grad=False)
    return layer


def _bitsandbytes(module: Any, base: type) -> _Plain | None:
    """Dequantize Linear4bit, Linear8bitLt and the corresponding embeddings."""
    if base.__name__ in ("Linear4bit", "Embedding4bit"):
        state = getattr(module.weight, "quant_state", None) or getattr(module, "quant_state", None)
        if state is None:
            return None  # quantized only once it moves to a device
        kind, weight = f"bitsandbytes {state.quant_type}", bitsandbytes_4bit(module.weight.data, state)
    elif base.__name__ in ("Linear8bitLt", "Embedding8bit"):
        holders = (module.weight, getattr(module, "state", None))  # a run moves them from one to the other
        state = next((holder for holder in holders if getattr(holder, "CB", None) is not None), None)
        if state is None:
            return None
        # the code 127 is the row's largest magnitude
        kind, weight = "bitsandbytes int8", state.CB.float() * (state.SCB.float() / 127).reshape(-1, 1)
    else:
        return None
    if "Embedding" not in base.__name__:
        return kind, _linear(weight, module.bias)
    embedding = nn.Embedding.from_pretrained(weight, padding_idx=module.padding_idx)
    return kind, embedding


def _gptq(module: Any, base: type) -> _Plain | None:
    """Dequantize layers of AutoGPTQ, GPTQModel and AutoAWQ whose kernels keep the order of the weights."""
    if not hasattr(module, "qweight") or "forward" not in vars(base):
        return None
    if base.__name__ in _FILE_ORDER_AWQ:
        return "AWQ", _linear(awq(module), module.bias)
    original = base.__name__ == "QuantLinear" and not any(word in base.__module__ for word in _REORDERING)
    if (original or base.__name__ in _FILE_ORDER) and not getattr(module, "planar", False):
        return f"GPTQ, {module.bits} bits", _linear(gptq(module, less_one=original), module.bias)
    raise ValueError("its kernel reorders them; load the model with backend='torch'")


def _transformers(module: Any, base: type) -> _Plain | None:
    """Dequantize FBGEMM layers, and the weights of fine-grained fp8 layers."""
    if base.__name__ == "FbgemmFp8Linear":
        return "fp8", _linear(scaled(module.weight, module.weight_scale), module.bias)
    if base.__name__ not in ("FP8Linear", "FP8GroupedLinear", "FP8Experts"):
        return None
    parameters = dict(module.named_parameters(recurse=False))
    dequantized: dict[int, Any] = {}
    for name, tensor in parameters.items():
        scale = parameters.get(f"{name}_scale_inv")
        if scale is not None and tensor.element_size() == 1:
            if not tensor.is_floating_point():
                raise ValueError("they are packed in 4 bits")
            sizes = getattr(module, "block_size", None)
            block = None if sizes is None else tuple(sizes)
            dequantized[id(tensor)] = nn.Parameter(scaled(tensor, scale, block), requires_grad=False)
    return ("fp8", dequantized) if dequantized else None


def _compressed(module: Any, base: type) -> _Plain | None:
    """Dequantize a linear layer of compressed-tensors."""
    scheme, scale = getattr(module, "quantization_scheme", None), getattr(module, "weight_scale", None)
    if base is not nn.Linear or scheme is None or scale is None:
        return None
    zero = getattr(module, "weight_zero_point", None)
    packed = getattr(module, "weight_packed", None)
    if packed is None:
        values = module.weight
        if values.element_size() > 1:
            return None  # decompressed already
    elif packed.dtype is not torch.int32:
        raise ValueError("they are packed in a format of 4-bit floats")
    else:
        bits, (rows, columns) = scheme.weights.num_bits, module.weight_shape.tolist()
        values = unpack(packed.T, bits, columns).T - (1 << (bits - 1))
        if zero is not None and zero.dtype is torch.int32 and zero.shape[0] != rows:
            zero = unpack(zero, bits, rows) - (1 << (bits - 1))
    scale, zero = _of_columns(module, scale), _of_columns(module, zero)
    return "compressed-tensors", _linear(scaled(values, scale, zero=zero), module.bias)


def _of_columns(module: Any, groups: Any) -> Any:
    """Expand scales or zeros to one per column if the module orders its columns by activations."""
    order = getattr(module, "weight_g_idx", None)
    if groups is None or order is None or groups.dim() != 2 or groups.shape[1] == 1 or (order < 0).any():
        return groups
    return groups[:, order.long()]


def _torch(module: Any, base: type) -> _Plain | None:
    """Dequantize layers of torch.ao and compressed-tensors."""
    if base is fx.GraphModule:
        names = {getattr(node.target, "__name__", "") for node in module.graph.nodes}
        if not names.isdisjoint(_INTEGER_OPS):
            raise ValueError("its graph computes on integers (convert_fx)")
    return plain_torch_ao(module, base) or _compressed(module, base)


def _own_method(module: Any, base: type) -> _Plain | None:
    """Dequantize layers of HQQ and Quanto with their own methods."""
    if base.__name__ == "HQQLinear":
        return "HQQ", _linear(module.dequantize().float(), module.bias)
    if base.__name__ == "QLinear" and _plain_tensor(module.weight) is not None:
        return "Quanto", _linear(module.weight.dequantize().float(), module.bias)
    return None


_PACKAGES: Mapping[str, Callable[[Any, type], _Plain | None]] = {
    "auto_gptq": _gptq,
    "awq": _gptq,
    "bitsandbytes": _bitsandbytes,
    "gptqmodel": _gptq,
    "hqq": _own_method,
    "optimum": _own_method,
    "torch": _torch,
    "transformers": _transformers,
}


def float_class(module: nn.Module) -> type[nn.Module] | None:
    """Return the float class with the same attributes, if there is one."""
    kind = type(module)
    if not kind.__module__.startswith(_TORCH_AO_LAYERS_PACKAGES):
        return None
    if kind.__name__ in _SAME:
        plain: type[nn.Module] = getattr(nn, kind.__name__)
        return plain
    if kind.__name__ in ("LSTM", "MultiheadAttention") and "dynamic" not in kind.__module__:
        return kind.__mro__[1]
    return None


def plain_torch_ao(module: Any, base: type) -> tuple[str, nn.Module] | None:
    """Return the format of a quantized torch.ao layer and its float layer; ``None`` for other layers.

    Raises:
        ValueError: The layer has no float counterpart.
    """
    if (
        not base.__module__.startswith(_TORCH_AO_LAYERS_PACKAGES)
        or "forward" not in vars(base)
        or float_class(module) is not None
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
        layer = nn.PReLU(module.num_parameters)
        layer.weight = _parameter(module.weight)
        return kind, layer
    activation = _ACTIVATIONS.get(name)
    if activation is not None:
        return kind, nn.Sequential(_float_layer(module, activation[0]), activation[1](module))
    if name not in _SETTINGS:
        raise ValueError("the layer has no float counterpart")
    return kind, _float_layer(module, name)


_ACTIVATIONS: dict[str, tuple[str, Callable[[Any], nn.Module]]] = {
    "LinearReLU": ("Linear", lambda module: nn.ReLU()),
    "LinearLeakyReLU": ("Linear", lambda module: nn.LeakyReLU(module.negative_slope)),
    "LinearTanh": ("Linear", lambda module: nn.Tanh()),
    **{f"ConvReLU{n}d": (f"Conv{n}d", lambda module: nn.ReLU()) for n in (1, 2, 3)},
}


def _float_layer(module: Any, name: str) -> nn.Module:
    """Build a float layer with the settings, weights and biases of a quantized one."""
    settings = {setting: getattr(module, setting) for setting in _SETTINGS[name]}
    weights = {} if not hasattr(module, "get_weight") else {**module.get_weight(), **module.get_bias()}
    if not weights:
        weights = {"weight": module.weight(), "bias": module.bias() if hasattr(module, "bias") else None}
        settings |= {"bias": weights["bias"] is not None} if hasattr(module, "bias") else {}
    if "Transpose" in name:
        settings["output_padding"] = module.output_padding
    if "Conv" in name:
        settings["padding_mode"] = module.padding_mode
    layer: nn.Module = getattr(nn, name)(**settings, device="meta")
    for attribute, tensor in weights.items():
        if tensor is not None:
            setattr(layer, attribute, _parameter(tensor))
    if isinstance(layer, nn.RNNBase):
        layer._init_flat_weights()
    return layer


def _parameter(tensor: Tensor) -> nn.Parameter:
    plain = tensor.dequantize() if tensor.is_quantized else tensor
    return nn.Parameter(plain.detach().float().contiguous(), requires_grad=False)


def unpack(packed: Tensor, bits: int, count: int) -> Tensor:
    """Unpack integers of any number of bits from int32 words along the first axis, the lowest bits first.

    A value may span two words.
    """
    start = torch.arange(count, device=packed.device) * bits
    word, shift = start // 32, (start % 32).view(-1, *[1] * (packed.dim() - 1))
    words = packed.long() & 0xFFFFFFFF
    above = words[(word + 1).clamp(max=len(words) - 1)] << (32 - shift)
    return (words[word] >> shift | above) & ((1 << bits) - 1)


def scaled(
    values: Tensor, scale: Tensor, block: tuple[int, ...] | None = None, zero: Tensor | None = None
) -> Tensor:
    """Multiply codes of any dtype by their scales: one per tensor, row, group of columns or block.

    ``block`` is the size of a block along the last axes; the last block may be partial. Without it, the shape
    of the scales determines to which codes each applies. Zero points are subtracted first, and have the shape
    of the scales.

    Raises:
        ValueError: The shapes do not fit.
    """
    wide = values.float() if zero is None else values.float() - _spread(zero, values.shape, block)
    return wide * _spread(scale, values.shape, block)


def _spread(scale: Tensor, shape: torch.Size, block: tuple[int, ...] | None) -> Tensor:
    """Broadcast scales to the elements that they apply to."""
    wide = scale.float()
    if block is None and wide.numel() == 1:
        return wide.reshape(())
    if block is None and wide.dim() == 1 and len(wide) == shape[0]:
        wide = wide.view(-1, *[1] * (len(shape) - 1))
    widths = [*[1] * (len(shape) - len(block)), *block] if block is not None else _widths(wide.shape, shape)
    counts = [-(-size // width) for size, width in zip(shape, widths, strict=False)]
    if list(wide.shape) != counts or len(widths) != len(shape):
        raise ValueError(f"scales of shape {tuple(scale.shape)} for values of shape {tuple(shape)}")
    for axis, (size, width) in enumerate(zip(shape, widths, strict=True)):
        if counts[axis] not in (1, size):
            wide = wide.repeat_interleave(width, axis).narrow(axis, 0, size)
    return wide


def _widths(counts: torch.Size, shape: torch.Size) -> list[int]:
    """Return the size of a block along each axis, from the number of scales along it."""
    return [
        _BLOCK if count not in (1, size) and count == -(-size // _BLOCK) else max(1, size // max(1, count))
        for count, size in zip(counts, shape, strict=False)
    ]


def bitsandbytes_4bit(data: Tensor, state: Any) -> Tensor:
    """Look up each nibble, the high one first, and multiply by the largest magnitude of its block.

    The magnitudes may themselves be quantized to 8 bits about their mean (``nested``). After a run on a CPU
    with bfloat16 instructions, the codes are packed in blocks of 32 rows.
    """
    if getattr(state, "packing_format_for_cpu", False):
        rows, half = data.shape
        packed = data.reshape(-1, 32)
        codes = torch.cat([packed & 15, packed >> 4], 1).reshape(-1, half, 32, 2)
        codes = codes.transpose(1, 2).reshape(rows, 2 * half).long()
        peaks = state.absmax.float().T.repeat_interleave(state.blocksize, 1)
        weight: Tensor = state.code.float()[codes] * peaks[:, : codes.shape[1]]
        return weight
    raw = data.contiguous().view(torch.uint8).reshape(-1)
    codes = torch.stack([raw >> 4, raw & 15], 1).reshape(-1).long()
    peaks = state.absmax.reshape(-1)
    if state.nested:
        inner = state.state2
        peaks = _blocks(inner.code[peaks.long()], inner.absmax, inner.blocksize) + state.offset
    count = state.shape.numel()
    return _blocks(state.code.float()[codes[:count]], peaks.float(), state.blocksize).reshape(state.shape)


def _blocks(values: Tensor, peaks: Tensor, size: int) -> Tensor:
    return values * peaks.repeat_interleave(size)[: len(values)]


def gptq(layer: Any, *, less_one: bool) -> Tensor:
    """Return the weight of a GPTQ layer: (code - zero) * scale, with zero and scale per group of inputs.

    A layer that reorders its inputs has their groups in ``g_idx``. With ``less_one``, zeros are stored minus
    one; they wrap around, except for 3 bits.
    """
    bits, (groups, outputs) = layer.bits, layer.scales.shape
    inputs = layer.qweight.shape[0] * 32 // bits
    codes = unpack(layer.qweight, bits, inputs)
    zeros = unpack(layer.qzeros.T, bits, outputs).T
    if less_one:
        zeros = zeros + 1 if bits == 3 else (zeros + 1) & ((1 << bits) - 1)
    group = getattr(layer, "g_idx", None)
    if group is None or group.numel() != inputs:
        group = torch.arange(inputs, device=codes.device) // -(-inputs // groups)
    group = group.long()
    weight: Tensor = (codes - zeros[group]).float() * layer.scales.float()[group]
    return weight.T.contiguous()


def awq(layer: Any) -> Tensor:
    """Return the weight of a 4-bit AWQ layer: (code - zero) * scale, per group of inputs.

    Rows are inputs in AWQ's order (GEMM) or outputs in plain order (GEMV).
    """
    codes, zeros = (unpack(t.T, 4, 8 * t.shape[1]).T for t in (layer.qweight, layer.qzeros))
    scales, size = layer.scales.float(), layer.group_size
    if layer.qweight.shape[0] == layer.in_features and layer.scales.shape[1] == layer.out_features:
        size = size if size > 0 else len(codes)
        order = torch.arange(codes.shape[1], device=codes.device).view(-1, 8)[:, list(_AWQ_ORDER)].reshape(-1)
        codes, zeros, scales = codes[:, order].T, zeros[:, order].T, scales.T
    group = torch.arange(codes.shape[1], device=codes.device) // size
    weight: Tensor = (codes - zeros[:, group]).float() * scales[:, group]
    return weight.contiguous()
