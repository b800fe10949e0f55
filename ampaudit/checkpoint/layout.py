"""Names the files of a converted directory and of a recording."""

from __future__ import annotations

__all__ = [
    "BESIDE_WEIGHTS",
    "CALL_FILES",
    "MANIFEST",
    "MASTER",
    "ONNX",
    "PLAN",
    "PROGRAM",
    "RECORDING",
    "REFERENCE",
    "REPORT",
    "SINGLE",
    "call_file",
]

SINGLE = "model.safetensors"  # the working weights, unless they are in shards
MASTER = "master"  # stands for "model" in the names of the masters' files
PROGRAM = "model.pt2"
ONNX = "model.onnx"
PLAN = "plan.yaml"
REPORT = "report.json"
REFERENCE = "reference.safetensors"
MANIFEST = "manifest.json"

# files of a conversion besides the weights; torch writes large ONNX weights to a separate file
BESIDE_WEIGHTS = frozenset({PROGRAM, ONNX, f"{ONNX}.data", PLAN, REPORT, REFERENCE})

# a recording: what was recorded, and two files per call
RECORDING = "recording.json"
CALL_FILES = "call-*.json"


def call_file(number: int) -> str:
    """Return the name of the file with a call's arguments; its tensors are beside it."""
    return f"call-{number:06d}.json"
