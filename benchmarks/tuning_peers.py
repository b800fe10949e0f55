"""Compares the ops that AutoCast and `convert --tune` keep in float32 for the same accuracy.

AutoCast keeps nodes in float32 whose values exceed a limit in a calibration run; bisection finds the largest
limit that reaches the accuracy. The files of both converters are run with every 16-bit value rounded.
"""

from __future__ import annotations

import math
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto

from benchmarks.tuning_models import TuningModel
from tests.support.onnx_models.exported import exported
from tests.support.onnx_strict import float_types, run_fp32, run_strict

PEER = Path(__file__).with_name("onnx_peers.py")
MOVES = frozenset({"Cast", "Constant", "Gather", "Identity", "Reshape", "Slice", "Split", "Transpose"})
HIGHEST, LOWEST = 9.0, -3.0  # log2 of AutoCast's default limit, and of one below every value of a norm
STEP = 0.05

Judged = dict[str, float]


@dataclass
class OnnxCase:
    """An exported model, with the conversions of it that were measured.

    Attributes:
        python: the interpreter that AutoCast is installed for.
    """

    folder: Path
    python: str
    path: Path
    inputs: Mapping[str, Any]
    reference: Mapping[str, Any]
    _known: dict[float, Judged] = field(default_factory=dict)

    @classmethod
    def of(cls, model: TuningModel, folder: Path, python: str) -> OnnxCase:
        path, inputs = exported(model.model, model.inputs, folder, ["logits"])
        np.savez(folder / "inputs.npz", **inputs)
        return cls(folder, python, path, inputs, run_fp32(path, inputs))

    def judge(self, path: Path) -> Judged:
        """Return the accuracy, the float32 ops and the casts of a converted file."""
        model = onnx.load(path)
        kinds = float_types(model.graph, {})
        outputs = run_strict(path, dict(self.inputs))
        decibels = [sqnr(self.reference[name], outputs[name]) for name in self.reference]
        computing = [node for node in model.graph.node if node.op_type not in MOVES]
        wide = [n for n in computing if any(kinds.get(name) == TensorProto.FLOAT for name in n.output)]
        casts = sum(node.op_type == "Cast" for node in model.graph.node)
        return {
            "db": round(min(decibels), 2),
            "float32_ops": len(wide),
            "ops": len(computing),
            "casts": casts,
        }

    def compare(self, target: float) -> dict[str, Judged]:
        """Convert with both converters for an accuracy in dB."""
        return {"autocast": self.best_autocast(target), "ampaudit": self.tune(target)}

    def autocast(self, power: float) -> Judged:
        """Convert with a limit of 2^power."""
        if power not in self._known:
            output = self.folder / "peer.onnx"
            names = ("autocast", self.path, self.folder / "inputs.npz", output, 2.0**power)
            command = [self.python, str(PEER), *map(str, names)]
            subprocess.run(command, check=True, capture_output=True, timeout=120)
            self._known[power] = {"limit": round(2.0**power, 4), **self.judge(output)}
        return self._known[power]

    def best_autocast(self, target: float) -> Judged:
        """Return AutoCast's conversion with the largest limit that reaches an accuracy in dB."""
        high, low = HIGHEST, LOWEST
        if self.autocast(high)["db"] >= target:
            return self.autocast(high)
        while high - low > STEP:
            middle = (high + low) / 2
            high, low = (high, middle) if self.autocast(middle)["db"] >= target else (middle, low)
        return self.autocast(low)

    def tune(self, target: float) -> Judged:
        """Convert with `ampaudit convert --tune`."""
        output = self.folder / "tuned"
        command = [sys.executable, "-m", "ampaudit", "convert", self.path, "--inputs"]
        command += [self.folder / "inputs.npz", "--tune", target, "-o", output, "--force"]
        subprocess.run(list(map(str, command)), check=True, capture_output=True, timeout=300)
        return self.judge(output / "model.onnx")


def sqnr(reference: Any, value: Any) -> float:
    reference, value = reference.astype(np.float64), value.astype(np.float64)
    error = float(np.square(reference - value).sum())
    return 10 * math.log10(float(np.square(reference).sum()) / error) if error else math.inf
