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

_SMALL: dict[str, tuple[bytes, Arrays]] = {}  # an export takes a second


def build(name: str, folder: Path, size: Size = "small", *, fresh: bool = False) -> tuple[Path, Arrays]:
    """Write ``model.onnx`` to a folder; the same name and size give the same file and inputs."""
    folder.mkdir(parents=True, exist_ok=True)
    if fresh or size != "small" or not GENERATED[name].startswith("exported"):
        return _built(name, folder, size)
    if name not in _SMALL:
        path, inputs = _built(name, folder, size)
        _SMALL[name] = path.read_bytes(), inputs
    (folder / "model.onnx").write_bytes(_SMALL[name][0])
    return folder / "model.onnx", {key: array.copy() for key, array in _SMALL[name][1].items()}


def _built(name: str, folder: Path, size: Size) -> tuple[Path, Arrays]:
    module, function = GENERATED[name].split(".")
    made: tuple[Path, Arrays] = getattr(import_module(f"{__name__}.{module}"), function)(folder, size)
    return made
