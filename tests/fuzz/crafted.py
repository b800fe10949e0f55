"""The crafted files: each would run something, write outside, or take the machine, if it were trusted."""

from __future__ import annotations

import json
from dataclasses import dataclass
from itertools import pairwise

from tests.fuzz import craft, craft_exported
from tests.fuzz.mutators import Special
from tests.support.rule_file import GOOD
from tests.support.saved import text_of

GRAPH, WEIGHTS, CONSTANTS = "models/model.json", "model_weights_config.json", "model_constants_config.json"
SAMPLES = "data/sample_inputs/model.pt"
BIG = 9 << 30


@dataclass(frozen=True, slots=True)
class Crafted:
    """A case.

    Attributes:
        make: returns the files, given the path of the marker.
        commands: what reads them.
        codes: the exit codes allowed; what is only odd, such as markup in names, may be accepted.
    """

    make: craft.Make
    commands: tuple[tuple[str, ...], ...]
    codes: frozenset[int] = frozenset({2})


def _reads(
    commands: tuple[tuple[str, ...], ...], cases: dict[str, craft.Make], *codes: int
) -> dict[str, Crafted]:
    return {title: Crafted(make, commands, frozenset(codes or (2,))) for title, make in cases.items()}


_EXPORTED = {
    "pt2: a member outside": craft_exported.exported(craft_exported.member("../../escaped", lambda _: b"x")),
    "pt2: a member at an absolute path": craft_exported.exported(
        craft_exported.member("MARKER", lambda _: b"x")
    ),
    "pt2: links": craft_exported.exported_zip(lambda data: craft.rezipped(data, craft.linked)),
    "pt2: a bomb": craft_exported.exported_zip(lambda data: craft.rezipped(data, craft.bombed)),
    "pt2: overlapping members": craft_exported.exported_zip(craft.overlapping),
    "pt2: a compiled library": craft_exported.exported(craft_exported.compiled_library),
    "pt2: a pickled weight": craft_exported.exported_json(
        WEIGHTS, craft_exported.tensor_meta(use_pickle=True)
    ),
    "pt2: a weight at another path": craft_exported.exported_json(
        WEIGHTS, craft_exported.tensor_meta(path_name="../../escaped")
    ),
    "pt2: a weight that runs": craft_exported.exported(craft_exported.pickled_weight),
    "pt2: a constant that runs": craft_exported.exported(craft_exported.pickled_constant, 1),
    "pt2: a custom object": craft_exported.exported(craft_exported.custom_object, 1),
    "pt2: an opaque object": craft_exported.exported(craft_exported.opaque_object, 1),
    "pt2: inputs that run": craft_exported.exported(craft_exported.member(SAMPLES, craft.reduce_pickle)),
    "pt2: inputs with a key of nested tuples": craft_exported.exported(
        craft_exported.member(SAMPLES, lambda _: craft.nested_tuples())
    ),
    "pt2: a treespec that imports": craft_exported.exported_json(GRAPH, craft_exported.importing_treespec),
    "pt2: a deep treespec": craft_exported.exported_json(GRAPH, craft_exported.deep_treespec),
    "pt2: an op that opens a file": craft_exported.exported_json(
        GRAPH,
        craft_exported.first_node(
            "torch.ops.aten.from_file.default",
            {"name": "filename", "arg": {"as_string": "MARKER"}, "kind": 1},
            {"name": "shared", "arg": {"as_bool": True}, "kind": 1},
            {"name": "size", "arg": {"as_int": 4}, "kind": 1},
        ),
    ),
    "pt2: an op that is a function": craft_exported.exported_json(
        GRAPH,
        craft_exported.first_node(
            "os.system", {"name": "command", "arg": {"as_string": "touch MARKER"}, "kind": 1}
        ),
    ),
    "pt2: 400,000 dimensions": craft_exported.exported_json(
        WEIGHTS,
        craft_exported.tensor_meta(
            sizes=craft_exported.sizes(1) * 400_000, strides=craft_exported.sizes(1) * 400_000
        ),
    ),
    "pt2: 9 GB with stride 0": craft_exported.exported_json(
        WEIGHTS,
        craft_exported.tensor_meta(sizes=craft_exported.sizes(BIG // 4), strides=craft_exported.sizes(0)),
    ),
}
_PICKLED = {
    "pt: a call": craft.pickled(craft.reduce_pickle),
    "pt: a call, as before torch 1.6": lambda marker: {"m.pt": craft.reduce_pickle(marker)},
    "pt: a call in an optimizer's state": craft.pickled(craft.optimizer_state),
    "pt: a key of nested tuples": craft.pickled(lambda _: craft.nested_tuples()),
    "pt: 400,000 dimensions": craft.pickled(lambda _: craft.tensor_pickle((1,) * 400_000, (1,) * 400_000)),
    "pt: 9 GB with stride 0": craft.pickled(lambda _: craft.tensor_pickle((BIG // 4,), (0,))),
    "pt: links": craft.checkpoint(lambda data: craft.rezipped(data, craft.linked)),
    "pt: a bomb": craft.checkpoint(lambda data: craft.rezipped(data, craft.bombed)),
    "pt: overlapping members": craft.checkpoint(craft.overlapping),
    "pt: a device": craft.text_file("m.pt", Special("link", "/dev/zero")),
    "pt: a pipe": craft.text_file("m.pt", Special("fifo")),
}
_SAFETENSORS = {
    "safetensors: a header of 2^63 bytes": craft.safetensors_file(craft.entry(), length=1 << 63),
    "safetensors: a header of nested lists": craft.safetensors_file(b'{"w":' + b"[" * 1_000_000),
    "safetensors: 400,000 dimensions": craft.safetensors_file(craft.entry(shape=[1] * 400_000), b"\0" * 4),
    "safetensors: more than the file": craft.safetensors_file(
        craft.entry(shape=[BIG], data_offsets=[0, 4 * BIG]), b"\0" * 4
    ),
    "safetensors: a product that overflows": craft.safetensors_file(
        craft.entry(shape=[1 << 62, 4, 1 << 62]), b"\0" * 4
    ),
    "safetensors: a device": craft.text_file("m.safetensors", Special("link", "/dev/zero")),
    "safetensors: a pipe": craft.text_file("m.safetensors", Special("fifo")),
}
_INDEX = "model.safetensors.index.json"
_INDEXES = {
    "index: a shard outside": craft.text_file(_INDEX, '{"weight_map": {"w": "../../etc/passwd"}}'),
    "index: a device": craft.text_file(_INDEX, Special("link", "/dev/zero")),
    "index: a list of 64 MB": craft.long_list(_INDEX, b"0,"),
}
_HUGGINGFACE = {
    "huggingface: code of its own": craft.configured(
        model_type="mine",
        architectures=["Model"],
        auto_map={"AutoConfig": "code.Config", "AutoModel": "code.Model"},
    ),
    "huggingface: an architecture that is a function": craft.configured(architectures=["pipeline"]),
    "huggingface: 20,000 layers": craft.configured(num_hidden_layers=20_000, hidden_size=1024),
    "huggingface: a vocabulary of 10^12": craft.configured(vocab_size=10**12),
    "huggingface: pickled weights": craft.pickled_weights,
    "huggingface: a device": lambda _: {"d/config.json": Special("link", "/dev/zero")},
    "huggingface: a configuration of 64 MB": craft.long_list("d/config.json", b"0,"),
}
_RULES = {
    "rules: a tag that runs": craft.text_file(
        "r.yaml", "a: !!python/object/apply:os.system ['touch MARKER']"
    ),
    "rules: aliases that multiply": craft.text_file(
        "r.yaml",
        "a: &a [x]\n" + "".join(f"{b}: &{b} [*{a},*{a},*{a}]\n" for a, b in pairwise("abcdefghijkl")),
    ),
    "rules: nested lists": craft.text_file("r.yaml", GOOD + "x: " + "[" * 100_000),
    "rules: a pattern that backtracks": craft.text_file(
        "r.yaml", GOOD.replace('layer: ["head*"]', 'layer_regex: ["(a*)*{1000}{1000}"]')
    ),
    "rules: a device": craft.text_file("r.yaml", Special("link", "/dev/zero")),
}
_REPORTS = {
    "report: nested lists": craft.text_file("r.json", "[" * 1_000_000),
    "report: a number of a million digits": craft.text_file("r.json", '{"schema": ' + "9" * 1_000_000 + "}"),
    "report: a list of 64 MB": craft.long_list("r.json", b"0,"),
    "report: a device": craft.text_file("r.json", Special("link", "/dev/zero")),
    "report: a pipe": craft.text_file("r.json", Special("fifo")),
}
_MARKUP = "</script><b>[red]\\u001b[31m\\u202e\\n::error::x\\r=1+1"
CRAFTED = {
    **_reads((("scan", "m.pt2"), ("convert", "m.pt2", "-o", "out")), _EXPORTED),
    **_reads((("convert", "m.pt", "-o", "out"),), _PICKLED),
    **_reads((("convert", "m.safetensors", "-o", "out"),), _SAFETENSORS),
    **_reads((("convert", _INDEX, "-o", "out"),), _INDEXES),
    **_reads((("scan", "d"), ("convert", "d", "-o", "out")), _HUGGINGFACE),
    **_reads((("rules", "validate", "r.yaml"),), _RULES),
    **_reads((("report", "r.json"), ("diff", "r.json", "r.json")), _REPORTS),
    **_reads(
        (("scan", "m.onnx"), ("convert", "m.onnx", "-o", "out")),
        {"onnx: external data": craft.text_file("m.onnx", b"\x08\x07external_data../../etc/passwd")},
    ),
    **_reads(
        (("verify", "d"),),
        {"converted: another program": craft.converted(craft_exported.other_program)},
        1,
    ),
    **_reads(
        (("verify", "d"), ("convert", "d", "--to", "float32", "-o", "out")),
        {
            "converted: a file outside": craft.converted(craft.in_manifest("report.json", "../../escaped")),
            "converted: a manifest that is a device": craft.converted(
                lambda files, _: files | {"d/manifest.json": Special("link", "/dev/zero")}
            ),
        },
    ),
    **_reads(
        (("scan", "m.pt2"),),
        {
            "pt2: an evaluated size": craft_exported.exported_json(GRAPH, craft_exported.evaluated_size, 1),
            "pt2: evaluated guards": craft_exported.exported_json(GRAPH, craft_exported.evaluated_guards),
        },
    ),
    # what is not read, or only odd
    **_reads(
        (("scan", "m.pt2"),),
        {
            "pt2: markup in names": craft_exported.exported_json(GRAPH, craft_exported.markup_in_names),
        },
        *(0, 1, 2),
    ),
    **_reads(
        tuple(("report", "r.json", "--format", form) for form in ("text", "html", "github", "junit")),
        {
            "report: markup in names": craft.text_file(
                "r.json", text_of("overflow").replace("blocks.1.wo", _MARKUP)
            )
        },
        *(0, 2),
    ),
    **_reads(
        (("convert", "m.safetensors", "-o", "out"),),
        {
            "safetensors: markup in names": craft.safetensors_file(
                json.dumps(
                    {json.loads(f'"{_MARKUP}"'): {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}
                ).encode(),
                b"\0" * 4,
            )
        },
        *(0, 2),
    ),
}
