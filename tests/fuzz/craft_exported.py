"""Makes crafted exported programs from honest ones."""

from __future__ import annotations

import json
import zipfile
from collections.abc import Callable
from typing import Any

from tests.fuzz import honest
from tests.fuzz.containers import members_of, zip_of
from tests.fuzz.craft import Make, library, reduce_pickle
from tests.fuzz.mutators import Files

WEIGHTS, CONSTANTS, SAMPLES = (
    "model_weights_config.json",
    "model_constants_config.json",
    "data/sample_inputs/model.pt",
)


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


def other_program(files: Files, marker: str) -> Files:
    return files | {"d/model.pt2": exported(member(SAMPLES, reduce_pickle))(marker)["m.pt2"]}
