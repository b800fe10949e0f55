"""Operators of ONNX Runtime's own domain, and oddities of files, against ONNX Runtime."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper

from ampaudit.core.errors import AuditError
from ampaudit.source.onnx.files import OnnxFile, read_onnx
from ampaudit.source.onnx.model import OnnxModel
from ampaudit.source.onnx.values import OPERATORS

MS = "com.microsoft"
RANDOM = np.random.default_rng(0)


def floats(*shape: int) -> Any:
    return RANDOM.standard_normal(shape).astype(np.float32)


def model_of(nodes: list[Any], given: dict[str, Any], outputs: list[str], stored: dict[str, Any]) -> Any:
    inputs = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in given.items()
    ]
    made = [onnx.ValueInfoProto(name=name) for name in outputs]
    tensors = [onnx.numpy_helper.from_array(array, name) for name, array in stored.items()]
    graph = helper.make_graph(nodes, "graph", inputs, made, tensors)
    imports = [helper.make_opsetid("", 20), helper.make_opsetid(MS, 1)]
    return helper.make_model(graph, opset_imports=imports, ir_version=10)


def ours(proto: Any, given: dict[str, Any]) -> dict[str, torch.Tensor]:
    model = OnnxModel(OnnxFile(Path("model.onnx"), ir.from_proto(proto)))
    with torch.no_grad():
        return model(**{name: torch.from_numpy(array.copy()) for name, array in given.items()})


def agrees(proto: Any, given: dict[str, Any], rtol: float = 1e-4, atol: float = 1e-5) -> None:
    session = onnxruntime.InferenceSession(proto.SerializeToString(), providers=["CPUExecutionProvider"])
    names = [output.name for output in session.get_outputs()]
    found = ours(proto, given)
    for name, wanted in zip(names, session.run(None, given), strict=True):
        np.testing.assert_allclose(found[name].numpy(), wanted, rtol=rtol, atol=atol, err_msg=name)


X, W, B = floats(2, 5, 8), 1 + floats(8) / 8, floats(8)
PACKED = RANDOM.integers(0, 255, (6, 2, 16), np.uint8)
QKV = {"q": floats(2, 5, 8), "k": floats(2, 7, 8), "v": floats(2, 7, 8)}
PADDING = np.array([[1, 1, 1, 1, 1, 0, 0], [1, 1, 1, 1, 1, 1, 1]], np.int32)
# operator, inputs in order, number of outputs that are compared, attributes
CASES: dict[str, tuple[str, list[Any], int, dict[str, Any]]] = {
    "gelu": ("Gelu", [X], 1, {}),
    "fast gelu": ("FastGelu", [X, B], 1, {}),
    "fast gelu without bias": ("FastGelu", [X], 1, {}),
    "bias gelu": ("BiasGelu", [X, B], 1, {}),
    "quick gelu": ("QuickGelu", [X], 1, {}),
    "quick gelu with alpha": ("QuickGelu", [X], 1, {"alpha": 1.0}),
    "fused matmul": ("FusedMatMul", [floats(2, 4, 3), floats(2, 5, 4)], 1,
                     {"transA": 1, "transB": 1, "alpha": 0.5}),
    "skip layer norm": ("SkipLayerNormalization", [X, floats(2, 5, 8), W, B, floats(8)], 4,
                        {"epsilon": 1e-5}),
    "skip layer norm alone": ("SkipLayerNormalization", [X, floats(2, 5, 8), W], 1, {}),
    "skip rms norm": ("SkipSimplifiedLayerNormalization", [X, floats(2, 5, 8), W, floats(8)], 4,
                      {"epsilon": 1e-5}),
    "4 bits": ("MatMulNBits", [floats(3, 64), PACKED, floats(12)], 1,
               {"N": 6, "K": 64, "block_size": 32, "bits": 4}),
    "4 bits with zero points": (
        "MatMulNBits",
        [floats(3, 64), PACKED, floats(12), RANDOM.integers(0, 255, 6, np.uint8)],
        1, {"N": 6, "K": 64, "block_size": 32, "bits": 4},
    ),
    "heads": ("MultiHeadAttention", list(QKV.values()), 1, {"num_heads": 2}),
    "heads with bias": ("MultiHeadAttention", [*QKV.values(), floats(24)], 1, {"num_heads": 2, "scale": 0.3}),
    "heads with padding": ("MultiHeadAttention", [*QKV.values(), None, PADDING], 1, {"num_heads": 2}),
    "heads with a mask": ("MultiHeadAttention", [*QKV.values(), None, None, floats(2, 2, 5, 7)], 1,
                          {"num_heads": 2}),
    "causal heads": ("MultiHeadAttention", [X, floats(2, 5, 8), floats(2, 5, 8)], 1,
                     {"num_heads": 2, "unidirectional": 1}),
    "heads with a cache": (
        "MultiHeadAttention",
        [X[:, :1], X[:, 1:2], X[:, 2:3], None, None, None, floats(2, 2, 3, 4), floats(2, 2, 3, 4)],
        3, {"num_heads": 2},
    ),
    "packed attention": ("Attention", [X, floats(8, 24), floats(24)], 1, {"num_heads": 2}),
    "packed causal attention": ("Attention", [X, floats(8, 24), floats(24)], 1,
                                {"num_heads": 2, "unidirectional": 1}),
    "packed attention with padding": ("Attention", [X, floats(8, 24), floats(24), PADDING[:, :5]], 1,
                                      {"num_heads": 2}),
    "packed attention with lengths": (
        "Attention", [X, floats(8, 24), floats(24), np.array([3, 5], np.int32)], 1, {"num_heads": 2},
    ),
    "through ONNX Runtime": ("GroupQueryAttention", [
        floats(1, 1, 16), floats(1, 1, 16), floats(1, 1, 16), floats(1, 2, 3, 8), floats(1, 2, 3, 8),
        np.array([3], np.int32), np.array(4, np.int32),
    ], 3, {"num_heads": 2, "kv_num_heads": 2}),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_operators_of_the_runtime(name: str) -> None:
    operator, values, count, attributes = CASES[name]
    given = {f"i{n}": value for n, value in enumerate(values) if value is not None}
    names = ["" if value is None else f"i{n}" for n, value in enumerate(values)]
    outputs = [f"o{n}" for n in range(count)]
    if operator.startswith("Skip") and count == 4:  # of the statistics, ONNX Runtime computes none
        outputs = ["o0", "", "", "o3"]
    node = helper.make_node(operator, names, outputs, name="node", domain=MS, **attributes)
    agrees(model_of([node], given, [o for o in outputs if o], {}), given)


def test_all_operators_of_the_domain_are_tried() -> None:
    tried = {operator for operator, *_ in CASES.values()} | {"SimplifiedLayerNormalization"}
    assert {name for domain, name in OPERATORS if domain == MS} <= tried


def test_the_simplified_norm_of_the_standard_domain() -> None:
    given = {"x": X}
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "w"], ["y"], epsilon=1e-6)
    agrees(model_of([node], given, ["y"], {"w": W}), given)


def test_the_simplified_norm_over_several_axes_gives_its_statistics() -> None:
    node = helper.make_node("SimplifiedLayerNormalization", ["x", "w"], ["y", "s"], axis=1, epsilon=1e-6)
    found = ours(model_of([node], {"x": X}, ["y", "s"], {"w": floats(*X.shape[1:])}), {"x": X})["s"]
    mean = torch.from_numpy(X).square().mean((1, 2), keepdim=True)
    torch.testing.assert_close(found, torch.rsqrt(mean + 1e-6))


def test_instance_norm_ignores_an_attribute_of_group_norm() -> None:
    node = helper.make_node("InstanceNormalization", ["x", "w", "b"], ["y"], num_groups=1)
    found = ours(model_of([node], {"x": X}, ["y"], {"w": W[:5], "b": B[:5]}), {"x": X})["y"]
    x, w, b = map(torch.from_numpy, (X, W[:5], B[:5]))
    torch.testing.assert_close(found, torch.nn.functional.instance_norm(x, weight=w, bias=b))


def test_an_operator_that_nobody_has_is_named() -> None:
    node = helper.make_node("Frobnicate", ["x"], ["y"], name="strange", domain="org.example")
    model = model_of([node], {"x": X}, ["y"], {})
    model.opset_import.append(helper.make_opsetid("org.example", 1))
    with pytest.raises(AuditError, match=r"the node strange \(Frobnicate\): no operator Frobnicate"):
        ours(model, {"x": X})


def test_without_onnx_runtime_the_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    node = helper.make_node("MelWeightMatrix", ["a", "b", "c", "d", "e"], ["y"], name="mel")
    sizes = {name: np.array(size) for name, size in zip("abc", (8, 16, 8192), strict=True)}
    ends = {name: np.array(end, np.float32) for name, end in zip("de", (0, 4096), strict=True)}
    with pytest.raises(AuditError, match=r"(?s)mel \(MelWeightMatrix\).*ampaudit\[onnx\]") as raised:
        ours(model_of([node], {"x": X}, ["y"], sizes | ends), {"x": X})
    assert "\n  next: pip install" in str(raised.value)


def test_a_body_reads_values_from_around_it_and_has_its_own() -> None:
    """An outer value that only the body reads, a constant and an initializer inside it, and a shadow."""
    body = helper.make_graph(
        [
            helper.make_node("Constant", [], ["half"], value_float=0.5),
            helper.make_node("Mul", ["carried", "outer"], ["m"]),
            helper.make_node("Mul", ["m", "half"], ["n"]),
            helper.make_node("Add", ["n", "inner"], ["next"]),
            helper.make_node("Identity", ["going"], ["still"]),
            helper.make_node("ReduceSum", ["next"], ["row"], keepdims=0),
        ],
        "body",
        [
            helper.make_tensor_value_info("i", TensorProto.INT64, []),
            helper.make_tensor_value_info("going", TensorProto.BOOL, []),
            helper.make_tensor_value_info("carried", TensorProto.FLOAT, None),
        ],
        [
            helper.make_tensor_value_info("still", TensorProto.BOOL, []),
            helper.make_tensor_value_info("next", TensorProto.FLOAT, None),
            helper.make_tensor_value_info("row", TensorProto.FLOAT, []),
        ],
        [onnx.numpy_helper.from_array(B, "inner")],
    )
    nodes = [
        helper.make_node("Sigmoid", ["x"], ["outer"]),
        helper.make_node("Loop", ["count", "", "x"], ["last", "rows"], body=body),
        helper.make_node("Neg", ["last"], ["negated"]),
    ]
    agrees(model_of(nodes, {"x": X}, ["negated", "rows"], {"count": np.array(3)}), {"x": X})


def test_an_error_inside_a_body_names_the_inner_node_once() -> None:
    output = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
    inner = helper.make_node("Frobnicate", ["x"], ["out"], name="strange", domain="org.example")
    branch = helper.make_graph([inner], "branch", [], [output])
    node = helper.make_node("If", ["yes"], ["y"], name="if", then_branch=branch, else_branch=branch)
    model = model_of([node], {"x": X}, ["y"], {"yes": np.array(True)})
    model.opset_import.append(helper.make_opsetid("org.example", 1))
    with pytest.raises(AuditError) as raised:
        ours(model, {"x": X})
    assert str(raised.value).count("the node") == 1


def test_branches_of_a_known_condition() -> None:
    def branch(operator: str) -> Any:
        output = helper.make_tensor_value_info("out", TensorProto.FLOAT, None)
        return helper.make_graph([helper.make_node(operator, ["x"], ["out"])], operator, [], [output])

    nodes = [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Gather", ["shape", "zero"], ["rows"]),
        helper.make_node("Greater", ["rows", "zero"], ["any"]),
        helper.make_node("If", ["any"], ["y"], then_branch=branch("Exp"), else_branch=branch("Neg")),
    ]
    agrees(model_of(nodes, {"x": X}, ["y"], {"zero": np.array(0)}), {"x": X})


def test_functions_of_the_model_have_attributes_with_defaults() -> None:
    scaled = helper.make_function(
        "org.example", "Scaled", ["a"], ["b"],
        [
            _referring(helper.make_node("Constant", [], ["s"]), "value_float", "scale"),
            helper.make_node("Mul", ["a", "s"], ["b"]),
        ],
        [helper.make_opsetid("", 20)], attributes=[], attribute_protos=[helper.make_attribute("scale", 2.0)],
    )  # fmt: skip
    twice = helper.make_function(
        "org.example", "Twice", ["a"], ["b"],
        [
            helper.make_node("Scaled", ["a"], ["t"], domain="org.example"),
            _referring(helper.make_node("Scaled", ["t"], ["b"], domain="org.example"), "scale", "by"),
        ],
        [helper.make_opsetid("org.example", 1)], attributes=["by"],
    )  # fmt: skip
    nodes = [helper.make_node("Twice", ["x"], ["y"], domain="org.example", by=5.0)]
    model = model_of(nodes, {"x": X}, ["y"], {})
    model.functions.extend([scaled, twice])
    model.opset_import.append(helper.make_opsetid("org.example", 1))
    agrees(model, {"x": X})


def test_functions_in_a_circle_are_refused() -> None:
    functions = [
        helper.make_function(
            "org.example", name, ["a"], ["b"],
            [helper.make_node(other, ["a"], ["b"], domain="org.example")],
            [helper.make_opsetid("org.example", 1)],
        )
        for name, other in (("There", "Back"), ("Back", "There"))
    ]  # fmt: skip
    node = helper.make_node("There", ["x"], ["y"], domain="org.example")
    model = model_of([node], {"x": X}, ["y"], {})
    model.functions.extend(functions)
    model.opset_import.append(helper.make_opsetid("org.example", 1))
    with pytest.raises(AuditError, match="in a circle") as raised:
        ours(model, {"x": X})
    assert not hasattr(raised.value, "__notes__"), "it names one node"


def _referring(node: Any, name: str, to: str) -> Any:
    node.attribute.append(onnx.AttributeProto(name=name, ref_attr_name=to, type=onnx.AttributeProto.FLOAT))
    return node


def test_an_initializer_that_is_an_input_may_be_given() -> None:
    model = model_of([helper.make_node("Mul", ["x", "w"], ["y"])], {"x": X, "w": W}, ["y"], {"w": W})
    agrees(model, {"x": X})


@pytest.mark.parametrize("version", [7, 8, 9, 10, 11, 12, 13, 14, 17, 20, 21])
def test_old_operator_sets(version: int) -> None:
    """Attributes that became inputs: of Clip, Pad, Slice, Squeeze, Dropout, TopK, ReduceSum, Upsample."""
    x = floats(1, 2, 4, 4)
    nodes, stored = [], {}

    def node(operator: str, before: str, after: str, since: int, **attributes: Any) -> None:
        """Attributes as inputs from the version ``since`` on."""
        names = [before]
        if version >= since:
            for name, value in attributes.items():
                kind = np.float32 if isinstance(value, float) else np.int64
                stored[f"{after}_{name}"] = np.array(value, kind)
                names.append(f"{after}_{name}")
        nodes.append(helper.make_node(operator, names, [after], **({} if version >= since else attributes)))

    node("Clip", "x", "a", 11, min=-1.0, max=1.0)
    node("Pad", "a", "b", 11, pads=[0, 0, 1, 0, 0, 0, 0, 1])
    node("Slice", "b", "c", 10, starts=[0, 1], ends=[2, 4], axes=[1, 2])
    node("Unsqueeze", "c", "d", 13, axes=[0])
    node("Squeeze", "d", "e", 13, axes=[0])
    node("ReduceSum", "e", "f", 13, axes=[2])
    nodes.append(helper.make_node("Dropout", ["f"], ["g"]))
    nodes.append(helper.make_node("Softmax", ["g"], ["h"], axis=1))
    model = model_of(nodes, {"x": x}, ["h"], stored)
    model.opset_import[0].version = version
    model.ir_version = 8
    agrees(model, {"x": x})


def test_the_long_name_of_the_standard_operator_set_has_its_version(tmp_path: Path) -> None:
    """Softmax of operator set 1 to 12 is over all axes from the second on."""
    x = floats(2, 3, 4)
    proto = model_of([helper.make_node("Softmax", ["x"], ["y"], domain="ai.onnx")], {"x": x}, ["y"], {})
    proto.opset_import[0].domain = "ai.onnx"
    onnx.save(proto, tmp_path / "model.onnx")
    found = OnnxModel(read_onnx(tmp_path / "model.onnx"))(torch.from_numpy(x))
    torch.testing.assert_close(found["y"], torch.softmax(torch.from_numpy(x), -1))
