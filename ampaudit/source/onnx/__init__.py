"""ONNX models: read as data, and run node by node as a module that can be traced."""
