"""ONNX files with their casts in the graph: converted in place, written and checked."""
