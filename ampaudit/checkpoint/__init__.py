"""Reads and writes checkpoints as streams, tensor by tensor and in pieces; names their files and types."""

from __future__ import annotations

__all__ = [
    "BESIDE_WEIGHTS",
    "CALL_FILES",
    "FLOAT_TYPES",
    "MANIFEST",
    "MASTER",
    "ONNX",
    "PLAN",
    "PROGRAM",
    "RECORDING",
    "REFERENCE",
    "REPORT",
    "SINGLE",
    "TORCH_NAMES",
    "call_file",
]

SINGLE = "model.safetensors"  # the working weights, unless they are in shards
MASTER = "master"  # replaces "model" in the names of the masters' files
PROGRAM = "model.pt2"
ONNX = "model.onnx"
PLAN = "plan.yaml"
REPORT = "report.json"
REFERENCE = "reference.safetensors"
MANIFEST = "manifest.json"

# files of a conversion besides the weights; torch writes large ONNX weights to a separate file
BESIDE_WEIGHTS = frozenset({PROGRAM, ONNX, f"{ONNX}.data", PLAN, REPORT, REFERENCE})

# a recording: its description, and two files per call
RECORDING = "recording.json"
CALL_FILES = "call-*.json"

TORCH_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32",
    "I32": "int32", "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32",
    "F64": "float64", "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu", "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
    "F4": "float4_e2m1fn_x2",
}  # fmt: skip
FLOAT_TYPES = frozenset({"F16", "BF16", "F32", "F64"})


def call_file(number: int) -> str:
    """Return the name of the file with a call's arguments; a file beside it holds their tensors."""
    return f"call-{number:06d}.json"
