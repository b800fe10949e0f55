"""Audits and conversions of ONNX files."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnx
from onnx import ModelProto

from tests.support.onnx_models import GENERATED, build
from tests.support.onnx_models.case import Arrays
from tests.support.onnx_models.odd import ODD
from tests.support.onnx_models.pairs import BROKEN, pair
from tests.support.onnx_models.planted import PLANTED, planted
from tools.replay.case import Run, family, session

SCAN = "scan {}/model.onnx --inputs {}/inputs.npz --format json"
CONVERT = "convert {}/model.onnx --inputs {}/inputs.npz --format json -o {}/out"
VERIFY = "verify {}/out --format json"


@family
def onnx_files() -> Iterator[tuple[str, Run]]:
    """Generated models and odd graphs: scanned, converted and verified."""
    for name in sorted(GENERATED.keys() - {"big"}):
        write = partial(_generated, name)
        yield name, session(SCAN, CONVERT, VERIFY, prepare=write)
        yield f"{name}-bfloat16", session(f"{SCAN} --dtype bfloat16 --prove", prepare=write)
    policies = f"{SCAN} --policy onnx,modelopt,torch-tensorrt"
    yield "policies", session(policies, prepare=partial(_generated, "mixed"))
    for name in ODD:
        yield f"odd-{name}", session(SCAN, CONVERT, VERIFY, prepare=partial(_odd, name))


@family
def onnx_faults() -> Iterator[tuple[str, Run]]:
    for name in PLANTED:
        for healthy in (False, True):
            word = "healthy" if healthy else "overflows"
            yield (
                f"{name}-{word}",
                session(f"{SCAN} --policy half --advise", prepare=partial(_planted, name, healthy)),
            )
    for name in BROKEN:
        for conversion in ("good", "bad"):
            words = f"{SCAN} --against {{}}/{conversion}.onnx"
            yield f"{name}-{conversion}", session(words, prepare=partial(_pair, name))


def _write(folder: Path, inputs: Arrays, **graphs: ModelProto) -> None:
    np.savez(folder / "inputs.npz", **inputs)
    for name, model in graphs.items():
        onnx.save(model, folder / f"{name}.onnx")


def _generated(name: str, folder: Path) -> None:
    _, inputs = build(name, folder)
    _write(folder, inputs)


def _odd(name: str, folder: Path) -> None:
    model, inputs = ODD[name]()
    _write(folder, inputs, model=model)


def _planted(name: str, healthy: bool, folder: Path) -> None:
    fault = planted(name, healthy=healthy)
    _write(folder, fault.inputs, model=fault.model)


def _pair(name: str, folder: Path) -> None:
    made = pair(name)
    _write(folder, made.inputs, model=made.original, good=made.good, bad=made.bad)
