"""Small valid graphs of odd structure, which a reader or converter of ONNX files must handle, by name."""

from __future__ import annotations

from tests.support.onnx_models.control import CONTROL
from tests.support.onnx_models.structure import STRUCTURE
from tests.support.onnx_models.values import VALUES

ODD = {**STRUCTURE, **VALUES, **CONTROL}
# by their nature: two nodes of one name, and shapes that contradict each other
REFUSED_BY = {"duplicate_node_names": "onnxruntime", "value_info_of_wrong_shapes": "onnx.checker"}
