"""Names the files of a converted directory."""

from __future__ import annotations

__all__ = ["BESIDE_WEIGHTS", "MANIFEST", "MASTER", "ONNX", "PLAN", "PROGRAM", "REFERENCE", "REPORT", "SINGLE"]

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
