"""Makes crafted files from honest ones; what would run creates ``marker``, a file elsewhere."""

from __future__ import annotations

import json
import shutil
import struct
import subprocess
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tests.fuzz import honest
from tests.fuzz.containers import members_of, zip_of
from tests.fuzz.mutators import Files, Special

Make = Callable[[str], Files]  # given the path of the marker


def reduce_pickle(marker: str, *, inside: bytes = b"") -> bytes:
    """Return a pickle that calls os.system, before or in place of a value."""
    text = f"touch {marker}".encode()
    return b"\x80\x02cos\nsystem\n(X" + struct.pack("<I", len(text)) + text + b"tR" + inside + b"."


def nested_tuples(depth: int = 100_000) -> bytes:
    """Return a pickle of a dict with a key of nested tuples, whose hash recurses."""
    return b"\x80\x02}" + b")" + b"\x85" * depth + b"K\x01s."


def library(marker: str) -> bytes:
    """Compile a library that creates the marker when it is loaded; without a compiler, one in name only."""
    compiler = shutil.which("cc")
    if compiler is None:
        return b"\x7fELF"
    code = f'#include <stdio.h>\n__attribute__((constructor)) void f(void) {{ fopen("{marker}", "w"); }}\n'
    with tempfile.TemporaryDirectory() as place:
        source, made = Path(place) / "a.c", Path(place) / "a.so"
        source.write_text(code, encoding="utf-8")
        subprocess.run([compiler, "-shared", "-fPIC", str(source), "-o", str(made)], check=True)
        return made.read_bytes()


def rezipped(data: bytes, change: Callable[[list[tuple[zipfile.ZipInfo, bytes]]], object]) -> bytes:
    members = members_of(data)
    change(members)
    return zip_of(members)


def bombed(members: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
    """Deflate the largest member, which then takes 400 MB."""
    at = max(range(len(members)), key=lambda i: len(members[i][1]))
    info = zipfile.ZipInfo(members[at][0].filename)
    info.compress_type = zipfile.ZIP_DEFLATED
    members[at] = info, b"\0" * 400_000_000


def overlapping(data: bytes) -> bytes:
    """Let every entry of the directory lead to the same bytes, 60,000 times."""
    end = data.rindex(b"PK\x05\x06")
    _, start = struct.unpack("<II", data[end + 12 : end + 20])
    entry = data[start : start + 46 + struct.unpack("<H", data[start + 28 : start + 30])[0]]
    count = 60_000
    directory = entry * count
    tail = struct.pack("<4s4H2IH", b"PK\x05\x06", 0, 0, count, count, len(directory), start, 0)
    return data[:start] + directory + tail


def linked(members: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
    for at, (info, _) in enumerate(members):
        link = zipfile.ZipInfo(info.filename)
        link.create_system, link.external_attr = 3, 0o120777 << 16
        members[at] = link, b"/etc/passwd"


def checkpoint(change: Callable[[bytes], bytes], which: int = 0) -> Make:
    def make(marker: str) -> Files:
        data = honest.checkpoints()[which]["m.pt"]
        assert isinstance(data, bytes)
        return {"m.pt": change(data)}

    return make


def pickled(pickle: Callable[[str], bytes]) -> Make:
    """Replace the pickle of a checkpoint."""

    def make(marker: str) -> Files:
        def change(members: list[tuple[zipfile.ZipInfo, bytes]]) -> None:
            at = next(i for i, (info, _) in enumerate(members) if info.filename.endswith("data.pkl"))
            members[at] = members[at][0], pickle(marker)

        return checkpoint(lambda data: rezipped(data, change))(marker)

    return make


def tensor_pickle(shape: tuple[int, ...], strides: tuple[int, ...]) -> bytes:
    """Return the pickle of a state_dict with one tensor, over the storage of an honest checkpoint."""

    def numbers(values: tuple[int, ...]) -> bytes:
        return b"(" + b"".join(b"L%dL\n" % value for value in values) + b"t"

    def text(value: bytes) -> bytes:
        return b"X" + struct.pack("<I", len(value)) + value

    storage = text(b"storage") + b"ctorch\nFloatStorage\n" + text(b"0") + text(b"cpu") + b"K\x0ct"
    rebuilt = b"(" + storage + b"QK\x00" + numbers(shape) + numbers(strides) + b"\x89}tR"
    return b"\x80\x02}" + text(b"w") + b"ctorch._utils\n_rebuild_tensor_v2\n(" + rebuilt + b"s."


def optimizer_state(marker: str) -> bytes:
    """Return the pickle of an empty state_dict beside an optimizer whose state is a call."""
    call = reduce_pickle(marker)[2:-1]
    return b"\x80\x02}X\n\x00\x00\x00state_dict}sX\t\x00\x00\x00optimizer" + call + b"s."


def safetensors_file(header: bytes, data: bytes = b"", length: int | None = None) -> Make:
    size = struct.pack("<Q", len(header) if length is None else length)
    return lambda _: {"m.safetensors": size + header + data}


def entry(**fields: Any) -> bytes:
    entry = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]} | fields
    return json.dumps({"w": entry}).encode()


def configured(**changes: Any) -> Make:
    """Change the configuration of a Hugging Face directory; code beside it creates the marker."""

    def make(marker: str) -> Files:
        files = dict(honest.huggingface()[0])
        config = files["d/config.json"]
        assert isinstance(config, bytes)
        files["d/config.json"] = json.dumps(json.loads(config) | changes).encode()
        code = f"open({marker!r}, 'w')\nfrom transformers import BertConfig as Config, BertModel as Model\n"
        return files | {"d/code.py": code.encode()}

    return make


def pickled_weights(marker: str) -> Files:
    files = {name: data for name, data in honest.huggingface()[0].items() if "safetensors" not in name}
    return files | {"d/pytorch_model.bin": reduce_pickle(marker)}


def converted(change: Callable[[Files, str], Files]) -> Make:
    return lambda marker: change(dict(honest.converted()[0]), marker)


def in_manifest(old: str, new: str) -> Callable[[Files, str], Files]:
    def change(files: Files, marker: str) -> Files:
        data = files["d/manifest.json"]
        assert isinstance(data, bytes)
        return files | {"d/manifest.json": data.replace(old.encode(), new.encode())}

    return change


def text_file(name: str, text: str | bytes | Special) -> Make:
    data = text.encode() if isinstance(text, str) else text
    return lambda marker: {
        name: data.replace(b"MARKER", marker.encode()) if isinstance(data, bytes) else data
    }


def long_list(name: str, text: bytes) -> Make:
    """Return a text with its middle repeated to 64 MB, made when it is needed."""
    return lambda _: {name: b"[" + text * (64_000_000 // len(text)) + b"0]"}
