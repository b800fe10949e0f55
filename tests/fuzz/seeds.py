"""Inputs that once ended badly: each is an honest input with the edit that mattered."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from typing import Any

from tests.fuzz.containers import members_of, zip_of
from tests.fuzz.mutators import Files, Special
from tests.support.saved import SAMPLES as KINDS

Edit = Callable[[Files], Files]
LONG = "é" * 400
SAMPLES = "data/sample_inputs/model.pt"
HOSTILE = "\x1b[31m\n::error::\u202e"


def _file(name: str, data: bytes | Special) -> Edit:
    return lambda files: files | {name: data}


def _replaced(name: str, old: bytes, new: bytes) -> Edit:
    def edit(files: Files) -> Files:
        data = files[name]
        assert isinstance(data, bytes)
        assert old in data, f"{name} has no {old!r}"
        return files | {name: data.replace(old, new, 1)}

    return edit


def _json(name: str, change: Callable[[Any], object]) -> Edit:
    def edit(files: Files) -> Files:
        data = files[name]
        assert isinstance(data, bytes)
        value = json.loads(data)
        change(value)
        return files | {name: json.dumps(value).encode()}

    return edit


def _header(name: str, change: Callable[[Any], object]) -> Edit:
    def edit(files: Files) -> Files:
        data = files[name]
        assert isinstance(data, bytes)
        (length,) = struct.unpack("<Q", data[:8])
        header = json.loads(data[8 : 8 + length])
        change(header)
        text = json.dumps(header).encode()
        return files | {name: struct.pack("<Q", len(text)) + text + data[8 + length :]}

    return edit


def _member(name: str, member: str, data: bytes) -> Edit:
    def edit(files: Files) -> Files:
        archive = files[name]
        assert isinstance(archive, bytes)
        members = [(i, data if i.filename.endswith(member) else old) for i, old in members_of(archive)]
        return files | {name: zip_of(members)}

    return edit


def _samples(files: Files, pickle: bytes) -> bytes:
    """Return the example inputs of a program with another pickle."""
    archive = files["m.pt2"]
    assert isinstance(archive, bytes)
    inner = next(data for info, data in members_of(archive) if info.filename.endswith(SAMPLES))
    return zip_of([(i, pickle if i.filename.endswith("data.pkl") else old) for i, old in members_of(inner)])


def _renamed_tensor(files: Files) -> Files:
    """Give a tensor of a pickle a name that no file can hold, of the same length."""
    archive = files["m.pt"]
    assert isinstance(archive, bytes)
    pickle = next(data for info, data in members_of(archive) if info.filename.endswith("data.pkl"))
    assert b"layer.bias" in pickle
    return _member("m.pt", "data.pkl", pickle.replace(b"layer.bias", b"layer.b\xed\xa0\x80"))(files)


def _set(*path: Any) -> Callable[[Any], object]:
    """Set the value at a path: the keys and indexes, then the value."""
    *way, last, value = path

    def change(document: Any) -> None:
        for part in way:
            document = document[part]
        document[last] = value

    return change


def _rename(old: str, new: str) -> Callable[[Any], object]:
    return lambda table: table.update({new: table.pop(old)})


_ZERO, _FIFO = Special("link", "/dev/zero"), Special("fifo")

# what the input shows: its format, the number of the honest input, the edit
BENCH = [kind for kind in KINDS if kind != "comparison"].index("bench")

SEEDS: dict[str, tuple[str, int, Edit]] = {
    "rules: a device": ("rules", 0, _file("rules.yaml", _ZERO)),
    "rules: a pipe": ("rules", 0, _file("rules.yaml", _FIFO)),
    "rules: a control character": ("rules", 0, _replaced("rules.yaml", b"mine", b"mi\x03ne")),
    "rules: a long op": ("rules", 0, _replaced("rules.yaml", b"[linear]", f"[{LONG}]".encode())),
    "rules: a long op of a vocabulary": (
        "rules", 3, _replaced("rules.yaml", b"op: [", f"op: [{LONG}, ".encode()),
    ),
    "rules: a long key": ("rules", 0, _replaced("rules.yaml", b"title:", f"{LONG}:".encode())),
    "rules: a long id": ("rules", 0, _replaced("rules.yaml", b"id: head", f"id: {LONG}".encode())),
    "rules: a long pattern": (
        "rules", 0, _replaced("rules.yaml", b'layer: ["head*"]', f'layer_regex: ["({LONG}"]'.encode()),
    ),
    "rules: a long parent": (
        "rules", 0, _replaced("rules.yaml", b"title:", f"extends: [{LONG}]\ntitle:".encode()),
    ),
    "report: a device": ("report", 0, _file("report.json", _ZERO)),
    "report: a pipe": ("report", 0, _file("report.json", _FIFO)),
    "report: a hostile note of a difference": (
        "report", -1, _json("report.json", _set("pairs", 0, "notes", [HOSTILE])),
    ),
    "report: a mode without its times": (
        "report", BENCH, _json("report.json", _set("rows", 0, "least", None)),
    ),
    "report: a mode that took no time": (
        "report", BENCH, _json("report.json", _set("rows", 0, "seconds", 0.0)),
    ),
    "baseline: a device": ("baseline", 0, _file("baseline.json", _ZERO)),
    "pyproject: a device": ("pyproject", 0, _file("pyproject.toml", _ZERO)),
    "pyproject: a pipe": ("pyproject", 0, _file("pyproject.toml", _FIFO)),
    "pyproject: a long key": (
        "pyproject", 0, _replaced("pyproject.toml", b"batches", f'"{LONG}"'.encode()),
    ),
    "pyproject: a long value": (
        "pyproject", 0, _replaced("pyproject.toml", b"batches = 2", f'batches = "{LONG}"'.encode()),
    ),
    "pyproject: nested arrays": (
        "pyproject", 0, _replaced("pyproject.toml", b"batches = 2", b"x = " + b"[" * 5000),
    ),
    "script: a device": ("script", 0, _file("train.py", _ZERO)),
    "script: a pipe": ("script", 0, _file("train.py", _FIFO)),
    "notebook: half a character": (
        "notebook", 0, _json("train.ipynb", _set("cells", 0, "source", "x = '\ud800'\nautocast()")),
    ),
    "inputs: a device": ("inputs", 0, _file("inputs.safetensors", _ZERO)),
    "inputs: a pipe": ("inputs", 0, _file("inputs.safetensors", _FIFO)),
    "inputs: a long type": (
        "inputs", 0, _header("inputs.safetensors", _set("input[0]", "dtype", LONG)),
    ),
    "inputs: a hostile name": (
        "inputs", 0, _header("inputs.safetensors", _rename("input[0]", HOSTILE)),
    ),
    "safetensors: a type that is a list": (
        "safetensors", 0, _header("m.safetensors", _set("count", "dtype", ["F32"])),
    ),
    "safetensors: a shape of many dimensions": (
        "safetensors", 0, _header("m.safetensors", _set("count", "shape", [1] * 400)),
    ),
    "pt: not an archive": ("pt", 0, _replaced("m.pt", b"PK\x05\x06", b"PK\x05\x05")),
    "pt: a byte order with zeros": ("pt", 0, _member("m.pt", "byteorder", b"\0" * 6)),
    "pt: half a character": ("pt", 0, _renamed_tensor),
    "pt2: a version with control characters": ("pt2", 0, _member("m.pt2", "archive_version", b"\x11\x10")),
    "pt2: sample inputs that are no tensors": (
        "pt2", 0, _member("m.pt2", "sample_inputs/model.pt", b"\x80\x02cos\nsystem\nq\0."),
    ),
    "pt2: sample inputs that are no arguments": (
        "pt2",
        0,
        lambda files: _member("m.pt2", SAMPLES, _samples(files, b"\x80\x02K\x00}\x86."))(files),
    ),
    "huggingface: a long model type": (
        "huggingface", 0, _json("d/config.json", _set("model_type", LONG)),
    ),
    "huggingface: a size that is a text": (
        "huggingface", 0, _json("d/config.json", _set("hidden_size", HOSTILE)),
    ),
}  # fmt: skip
