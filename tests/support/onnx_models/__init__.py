"""ONNX models for tests and benchmarks: generated in two sizes, odd, and with a known fault."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path

from tests.support.onnx_models.case import Arrays, Size

__all__ = ["GENERATED", "build"]

# name: module and function; the modules are imported late, as one of them needs torch's exporter
GENERATED = {
    "bert": "exported.bert",
    "gpt2": "exported.gpt2",
    "resnet": "exported.resnet",
    "t5": "exported.t5",
    "mask_constants": "generated.mask_constants",
    "mask_initializers": "generated.mask_initializers",
    "mixed": "generated.mixed",
    "big": "generated.big",
}


def build(name: str, folder: Path, size: Size = "small") -> tuple[Path, Arrays]:
    """Write ``model.onnx`` to a folder; the same name and size give the same file and inputs."""
    module, function = GENERATED[name].split(".")
    folder.mkdir(parents=True, exist_ok=True)
    made: tuple[Path, Arrays] = getattr(import_module(f"{__name__}.{module}"), function)(folder, size)
    return made
