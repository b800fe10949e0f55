"""The operators of ONNX as functions of PyTorch."""
