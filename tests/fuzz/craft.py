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

WEIGHTS, CONSTANTS, SAMPLES = (
    "model_weights_config.json",
    "model_constants_config.json",
    "data/sample_inputs/model.pt",
)

Make = Callable[[str], Files]  # given the path of the marker


def reduce_pickle(marker: str, *, inside: bytes = b"") -> bytes:
    """Return a pickle that calls os.system, before or in place of a value."""
    text = f"touch {marker}".encode()
    return b"\x80\x02cos\nsystem\n(X" + struct.pack("<I", len(text)) + text + b"tR" + inside + b"."


def nested_tuples(depth: int = 100_000) -> bytes:
    """Return a pickle of a dict with a key of nested tuples, whose hash recurses."""
    return b"\x80\x02}" + b")" + b"\x85" * depth + b"K\x01s."


def exported(edit: Callable[[dict[str, bytes], str], object], which: int = 0) -> Make:
    """Edit the members of an honest program by the ends of their names; new ones are added."""

    def make(marker: str) -> Files:
        archive = honest.exported()[which]["m.pt2"]
        assert isinstance(archive, bytes)
        members = members_of(archive)
        table = {info.filename.partition("/")[2]: data for info, data in members}
        edit(table, marker)
        root = members[0][0].filename.partition("/")[0]
        return {"m.pt2": zip_of([(zipfile.ZipInfo(f"{root}/{name}"), data) for name, data in table.items()])}

    return make


def _name(table: dict[str, bytes], end: str) -> str:
    return next(name for name in table if name.endswith(end))


def exported_json(end: str, change: Callable[[Any, str], object], which: int = 0) -> Make:
    def edit(table: dict[str, bytes], marker: str) -> None:
        name = _name(table, end)
        value = json.loads(table[name])
        change(value, marker)
        table[name] = json.dumps(value).encode()

    return exported(edit, which)


def exported_zip(change: Callable[[bytes], bytes]) -> Make:
    """Change the archive of an honest program."""

    def make(marker: str) -> Files:
        archive = honest.exported()[0]["m.pt2"]
        assert isinstance(archive, bytes)
        return {"m.pt2": change(archive)}

    return make


def pickled_weight(table: dict[str, bytes], marker: str) -> None:
    """Say that a weight is pickled, and let its pickle run."""
    _pickle_entry(table, marker, WEIGHTS, "linear.weight")


def pickled_constant(table: dict[str, bytes], marker: str) -> None:
    """Say that a constant is pickled, and let its pickle run."""
    _pickle_entry(table, marker, CONSTANTS, "constant")


def custom_object(table: dict[str, bytes], marker: str) -> None:
    """Say that a constant is a custom object."""
    _pickle_entry(table, marker, CONSTANTS, "constant", "custom_obj_0")


def opaque_object(table: dict[str, bytes], marker: str) -> None:
    """Say that a constant is an opaque object."""
    _pickle_entry(table, marker, CONSTANTS, "constant", "opaque_obj_0")


def _pickle_entry(table: dict[str, bytes], marker: str, config: str, key: str, path: str = "") -> None:
    place = _name(table, config)
    value = json.loads(table[place])
    entry = value["config"][key]
    entry["use_pickle"] = True
    entry["path_name"] = path or entry["path_name"]
    table[place] = json.dumps(value).encode()
    table[f"{place.rpartition('/')[0]}/{entry['path_name']}"] = reduce_pickle(marker)


def _evaluated(marker: str) -> str:
    return f"__import__('os').system('touch {marker}')"


def first_node(target: str, *inputs: dict[str, Any]) -> Callable[[Any, str], object]:
    """Replace the first node's op."""

    def change(program: Any, marker: str) -> None:
        node = program["graph_module"]["graph"]["nodes"][0]
        node["target"] = target
        node["inputs"] = json.loads(json.dumps(inputs).replace("MARKER", marker))

    return change


def tensor_meta(**changes: Any) -> Callable[[Any, str], object]:
    """Change the description of each stored tensor."""

    def change(table: Any, marker: str) -> None:
        for entry in table["config"].values():
            entry.update({k: v for k, v in changes.items() if k in entry})
            entry["tensor_meta"].update({k: v for k, v in changes.items() if k in entry["tensor_meta"]})
            if "path_name" in changes:
                entry["path_name"] = changes["path_name"].replace("MARKER", marker)

    return change


def sizes(*sizes: int) -> list[dict[str, int]]:
    return [{"as_int": size} for size in sizes]


def evaluated_size(program: Any, marker: str) -> None:
    text = json.dumps(program["graph_module"]["graph"])
    found = json.loads(text)
    for value in found["tensor_values"].values():
        for size in value["sizes"]:
            if "as_expr" in size:
                size["as_expr"]["expr_str"] = _evaluated(marker)
    program["graph_module"]["graph"] = found


def evaluated_guards(program: Any, marker: str) -> None:
    program["guards_code"] = [_evaluated(marker), f"L['x'].size()[0] == {_evaluated(marker)}"]


def importing_treespec(program: Any, marker: str) -> None:
    call = program["graph_module"]["module_call_graph"][0]["signature"]
    named = {"type": "ampaudit_canary.Class", "context": "null", "children_spec": []}
    call["in_spec"] = json.dumps([1, named])
    program["graph_module"]["treespec_namedtuple_fields"] = {"ampaudit_canary.Class": {"field_names": []}}


def deep_treespec(program: Any, marker: str) -> None:
    leaf = '{"type": null, "context": null, "children_spec": []}'
    deep = '{"type": "builtins.tuple", "context": "null", "children_spec": [' * 50_000 + leaf + "]}" * 50_000
    program["graph_module"]["module_call_graph"][0]["signature"]["in_spec"] = f"[1, {deep}]"


def markup_in_names(program: Any, marker: str) -> None:
    text = json.dumps(program).replace("p_linear_weight", "<script>x</script>[red]")
    program.clear()
    program.update(json.loads(text))
    for node in program["graph_module"]["graph"]["nodes"]:
        node["metadata"]["nn_module_stack"] = "L__self__,\x1b[31m</td>\n::error::,tests.fuzz.honest.Small"


def member(name: str, data: Callable[[str], bytes]) -> Callable[[dict[str, bytes], str], object]:
    return lambda table, marker: table.update({name.replace("MARKER", marker): data(marker)})


def compiled_library(table: dict[str, bytes], marker: str) -> None:
    """Add a compiled model, whose library creates the marker when it is loaded."""
    table["data/aotinductor/model/model.wrapper.so"] = library(marker)
    table["data/aotinductor/model/model.wrapper_metadata.json"] = b'{"AOTI_DEVICE_KEY": "cpu"}'


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


def other_program(files: Files, marker: str) -> Files:
    return files | {"d/model.pt2": exported(member(SAMPLES, reduce_pickle))(marker)["m.pt2"]}


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
