"""Generated models without an exporter: masks and eps, a mixed bag of ops, and one above 2 GB."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper

from tests.support.onnx_models.case import Arrays, Graph, Size, value

FINFO_MIN = float(np.finfo(np.float32).min)


def mask(folder: Path, size: Size, *, initializers: bool) -> tuple[Path, Arrays]:
    """Attention with masks of finfo.min and -1e9, x / (rms + 1e-8), log(p + 1e-8); one sample is padding."""
    width, length, layers = (256, 64, 4) if size == "full" else (16, 6, 2)
    random = np.random.default_rng(3)
    x = random.standard_normal((2, length, width), dtype=np.float32)
    x[0, 0] = 0.0  # a padded row, whose norm divides 0 by eps
    keep = np.ones((2, 1, length), dtype=bool)
    keep[0, :, length // 2 :] = False
    keep[1] = False  # a sample of nothing but padding
    graph = Graph({"x": x, "keep": keep})
    number = graph.keep if initializers else graph.constant
    number("lowest", FINFO_MIN), number("large", -1e9), number("zero", 0.0)
    number("eps", 1e-8), number("scale", width**-0.5)
    graph.keep("last", [-1], np.int64)
    graph.keep("causal", np.triu(np.full((length, length), -1e9, np.float32), 1))
    graph.add("Where", "keep zero large", "additive")
    graph.add("Where", "keep zero lowest", "padding")
    hidden = "x"
    for layer in range(layers):
        hidden = masked_layer(graph, hidden, layer, random, width)
    graph.add("Softmax", hidden, "p", axis=-1)
    graph.add("Add", "p eps", "p_eps")
    graph.add("Log", "p_eps", "log_p")
    path = folder / "model.onnx"
    onnx.save(graph.model("log_p"), path)
    return path, graph.inputs


def masked_layer(graph: Graph, x: str, layer: int, random: np.random.Generator, width: int) -> str:
    """Add x / (rms(x) + eps) and attention over it; the masks of the layers alternate."""
    name = f"layer{layer}"
    for weight in ("query", "key", "value"):
        array = random.standard_normal((width, width), dtype=np.float32) * width**-0.5
        graph.keep(f"{name}.{weight}", array)
    graph.add("Mul", f"{x} {x}", f"{name}_square")
    graph.add("ReduceMean", f"{name}_square last", f"{name}_mean", keepdims=1)
    graph.add("Sqrt", f"{name}_mean", f"{name}_rms")
    graph.add("Add", f"{name}_rms eps", f"{name}_rms_eps")
    graph.add("Div", f"{x} {name}_rms_eps", f"{name}_norm")
    for weight in ("query", "key", "value"):
        graph.add("MatMul", f"{name}_norm {name}.{weight}", f"{name}_{weight}")
    graph.add("Transpose", f"{name}_key", f"{name}_turned", perm=[0, 2, 1])
    graph.add("MatMul", f"{name}_query {name}_turned", f"{name}_scores")
    graph.add("Mul", f"{name}_scores scale", f"{name}_scaled")
    graph.add("Add", f"{name}_scaled {'additive' if layer % 2 else 'padding'}", f"{name}_masked")
    graph.add("Add", f"{name}_masked causal" if layer % 2 else f"{name}_masked zero", f"{name}_both")
    graph.add("Softmax", f"{name}_both", f"{name}_weights", axis=-1)
    graph.add("MatMul", f"{name}_weights {name}_value", f"{name}_mixed")
    return graph.add("Add", f"{x} {name}_mixed", f"{name}_out")


mask_constants = partial(mask, initializers=False)
mask_initializers = partial(mask, initializers=True)


def mixed(folder: Path, size: Size) -> tuple[Path, Arrays]:
    """Cast from int, Resize, Clip with an open end, a ReduceSum of about 2e5, If, and TopK."""
    side, gain = (64, 0.67) if size == "full" else (8, 87.0)
    random = np.random.default_rng(4)
    image = random.random((1, 3, side, side), dtype=np.float32)
    pixels = random.integers(0, 256, (1, 3, side, side), dtype=np.int32)
    graph = Graph({"image": image, "pixels": pixels})
    graph.keep("kernel", random.standard_normal((16, 3, 3, 3), dtype=np.float32) * 0.3)
    graph.keep("bias", np.zeros(16, np.float32))
    graph.keep("scales", [1.0, 1.0, 2.0, 2.0])
    numbers = {"brightest": 255.0, "lowest": 0.0, "highest": 6.0, "gain": gain, "million": 1e6, "limit": 0.05}
    numbers |= {"twice": 2.0, "half": 0.5}
    for name, number in numbers.items():
        graph.constant(name, number)
    graph.add("Cast", "pixels", "levels", to=TensorProto.FLOAT)
    graph.add("Div", "levels brightest", "bright")
    graph.add("Add", "bright image", "sum")
    graph.add("Conv", "sum kernel bias", "features", pads=[1, 1, 1, 1])
    graph.add("Clip", "features lowest highest", "clipped")
    graph.add("Clip", "clipped _ highest", "open_below")
    graph.add("Resize", "open_below _ scales", "larger", mode="linear")
    graph.add("Mul", "larger gain", "terms")
    graph.add("ReduceSum", "terms", "total", keepdims=0)  # 2e5
    graph.add("Div", "total million", "share")
    graph.add("Greater", "share limit", "is_large")
    shape = (1, 16, 2 * side, 2 * side)
    then, otherwise = branch("then", "twice", shape), branch("else", "half", shape)
    graph.add("If", "is_large", "picked", then_branch=then, else_branch=otherwise)
    graph.keep("row_shape", [16, -1], np.int64)
    graph.add("Reshape", "picked row_shape", "rows")
    graph.keep("count", [8], np.int64)
    graph.add("TopK", "rows count", "top top_index", axis=-1)
    graph.add("Mul", "top share", "scaled")
    path = folder / "model.onnx"
    onnx.save(graph.model({"scaled": TensorProto.FLOAT, "top_index": TensorProto.INT64}), path)
    return path, graph.inputs


def branch(name: str, factor: str, shape: tuple[int, ...]) -> onnx.GraphProto:
    """Scale the outer tensor ``larger``."""
    node = helper.make_node("Mul", ["larger", factor], [f"{name}_out"], name=f"{name}_mul")
    return helper.make_graph([node], name, [], [value(f"{name}_out", shape)])


def big(folder: Path, size: Size) -> tuple[Path, Arrays]:
    """Normed linear layers, whose 2.4 GB of weights are written to a file of their own, one by one."""
    width, layers = (4096, 36) if size == "full" else (32, 3)
    graph = Graph({"x": np.random.default_rng(5).standard_normal((8, width), dtype=np.float32)})
    graph.keep("scale", np.ones(width, np.float32))
    hidden = "x"
    with (folder / "model.bin").open("wb") as file:
        for layer in range(layers):
            random = np.random.default_rng([5, layer])
            weight = random.standard_normal((width, width), dtype=np.float32) * np.float32(width**-0.5)
            graph.initializers.append(external(f"weight{layer}", weight.shape, file.tell(), weight.nbytes))
            file.write(weight.tobytes())
            graph.add("LayerNormalization", f"{hidden} scale", f"norm{layer}", axis=-1)
            graph.add("MatMul", f"norm{layer} weight{layer}", f"linear{layer}")
            graph.add("Relu", f"linear{layer}", f"relu{layer}")
            hidden = graph.add("Add", f"{hidden} relu{layer}", f"hidden{layer}")
    path = folder / "model.onnx"
    onnx.save(graph.model(hidden), path)
    return path, graph.inputs


def external(name: str, shape: tuple[int, ...], offset: int, length: int) -> onnx.TensorProto:
    made = onnx.TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT)
    made.data_location = TensorProto.EXTERNAL
    for key, text in {"location": "model.bin", "offset": offset, "length": length}.items():
        made.external_data.add(key=key, value=str(text))
    return made
