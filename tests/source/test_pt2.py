"""Exported programs that are read as data: the same as torch loads, and nothing that is not data."""

from __future__ import annotations

import io
import json
import os
import re
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from functools import cache, reduce
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils import _pytree as pytree

from ampaudit import scan
from ampaudit.core.errors import SourceError
from ampaudit.core.source_config import SourceConfig
from ampaudit.source.exported import ExportedModel, read_program
from ampaudit.source.open import open_source
from ampaudit.source.pt2.graph import UnknownOperator, attribute_path, operator_named
from ampaudit.source.pt2.schema import check_expression
from tests.support import zoo


class Everything(nn.Module):
    """Tied weights, buffers that are written, constants, several results, nested inputs and outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.norm = nn.BatchNorm1d(4)
        self.tied = self.linear.weight
        self.register_buffer("calls", torch.zeros(4))
        self.register_buffer("loose", torch.full((4,), 3.0), persistent=False)
        self.constant = torch.tensor([1.0, 2.0, 3.0, 4.0])

    def forward(self, x: torch.Tensor, *, flag: bool | None = None, more: list[torch.Tensor]) -> Any:
        del flag
        y = self.norm(self.linear(x)) * self.constant + torch.tensor(2.0) + self.loose
        first, second = y.split(2, -1)
        self.calls.add_(1)
        value, index = y.max(-1)
        return OrderedDict(
            product=y @ self.tied,
            both=(first, [second, value]),
            nothing=None,
            index=index,
            size=x.shape[0] * 2,
            seen=self.calls + more[0],
            viewed=y.view(x.shape[0] * 2, -1),
            masked=y.masked_fill(y > 1, -float("inf")),
        )


class Branches(nn.Module):
    """Higher-order operators, vmap, complex numbers and random numbers."""

    def forward(self, x: torch.Tensor, c: torch.Tensor) -> Any:
        y = torch.vmap(lambda row: row.sin())(x)
        with torch.no_grad():
            y = y + 1
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = y @ y.T
        (w,) = torch.cond(c.sum() > 0, lambda a: (a.sin(),), lambda a: (a.cos(),), (y,))
        return y, {"z": z, "w": w, "f": torch.fft.fft(x) * (1 + 2j), "r": torch.dropout(x, 0.5, True)}


def everything() -> torch.export.ExportedProgram:
    return torch.export.export(
        Everything().train(),
        (torch.randn(3, 4),),
        {"flag": None, "more": [torch.ones(4)]},
        dynamic_shapes={"x": {0: torch.export.Dim("batch")}, "flag": None, "more": [None]},
    )


def branches() -> torch.export.ExportedProgram:
    return torch.export.export(Branches(), (torch.randn(3, 4), torch.ones(2)))


class Halved(nn.Module):
    """A parameter that each call halves."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.full((4,), 8.0), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.scale.mul_(0.5)
        return x * self.scale


def halved() -> torch.export.ExportedProgram:
    return torch.export.export(Halved(), (torch.randn(3, 4),))


def saved(program: torch.export.ExportedProgram, path: Path) -> Path:
    torch.export.save(program, path)
    return path


def compare(path: Path) -> None:
    """Run what we read and what torch loads on the example inputs; they must agree bit for bit."""
    ours, theirs = read_program(path), torch.export.load(path)
    assert ours.example is not None
    assert theirs.example_inputs is not None
    torch.manual_seed(0)
    found = ExportedModel(ours)(*ours.example[0], **ours.example[1])
    torch.manual_seed(0)
    expected = theirs.module(check_guards=False)(*theirs.example_inputs[0], **theirs.example_inputs[1])
    found, structure = pytree.tree_flatten(found)
    expected, expected_structure = pytree.tree_flatten(expected)
    assert structure == expected_structure
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0, equal_nan=True)
    assert list(ours.weights) == list(theirs.state_dict)
    assert ours.graph.state_dict().keys() == theirs.module(check_guards=False).state_dict().keys()
    for name, tensor in theirs.state_dict.items():
        assert torch.equal(ours.weights[name], tensor)
        assert isinstance(ours.weights[name], nn.Parameter) == isinstance(tensor, nn.Parameter)
        assert ours.weights[name].requires_grad == tensor.requires_grad


@pytest.mark.parametrize("make", [everything, branches, halved])
@pytest.mark.parametrize("decomposed", [False, True])
def test_a_program_computes_what_torch_loads(tmp_path: Path, make: Any, decomposed: bool) -> None:
    program = make()
    compare(saved(program.run_decompositions() if decomposed else program, tmp_path / "m.pt2"))


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "vit", "resnet"])
def test_architectures_compute_what_the_model_does(tmp_path: Path, name: str) -> None:
    torch.manual_seed(0)
    made = getattr(zoo, name)()
    model = made.model.eval()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False  # a cache is an object, which programs cannot return
    path = saved(torch.export.export(model, (), made.kwargs, strict=False), tmp_path / "m.pt2")
    program = read_program(path)
    assert program.example is not None
    with torch.no_grad():
        found = ExportedModel(program)(**program.example[1])
        expected = model(**made.kwargs)
    flat = [v for v in pytree.tree_leaves(dict(expected)) if isinstance(v, torch.Tensor)]
    for one, other in zip(pytree.tree_leaves(found), flat, strict=False):
        torch.testing.assert_close(one, other, rtol=0, atol=0)
    assert next(iter(found)) == next(iter(expected))


def test_tied_weights_stay_tied_and_are_not_copied(tmp_path: Path) -> None:
    program = read_program(saved(everything(), tmp_path / "m.pt2"))
    assert program.weights["tied"] is program.weights["linear.weight"]
    names = dict(ExportedModel(program).named_parameters(remove_duplicate=False))
    assert len(names) - len(set(map(id, names.values()))) == 1
    before = (tmp_path / "m.pt2").read_bytes()
    with torch.no_grad():
        program.weights["tied"].fill_(7.0)
    assert (tmp_path / "m.pt2").read_bytes() == before


def test_sizes_are_computed_from_the_inputs_given(tmp_path: Path) -> None:
    torch.manual_seed(0)
    program = everything()
    model = ExportedModel(read_program(saved(program, tmp_path / "m.pt2")))
    args, kwargs = (torch.randn(7, 4),), {"flag": None, "more": [torch.ones(4)]}
    found, expected = model(*args, **kwargs), program.module()(*args, **kwargs)
    assert found["size"] == 14
    assert torch.equal(found["viewed"], expected["viewed"])


Edit = Callable[[dict[str, Any]], None]


@cache
def members() -> bytes:
    """Return the file of ``everything``."""
    stream = io.BytesIO()
    torch.export.save(everything(), stream)
    return stream.getvalue()


def edited(
    tmp_path: Path, edit: Edit, member: str = "models/model.json", example: bytes | None = None
) -> Path:
    """Write the program of ``everything`` with one of its JSON members or its example inputs changed."""
    bad = tmp_path / "bad.pt2"
    with zipfile.ZipFile(io.BytesIO(members())) as source, zipfile.ZipFile(bad, "w") as target:
        for item in source.infolist():
            data = source.read(item)
            if item.filename.partition("/")[2] == member:
                table = json.loads(data)
                edit(table)
                data = json.dumps(table).encode()
            if example is not None and item.filename.endswith("sample_inputs/model.pt"):
                data = example
            target.writestr(f"bad/{item.filename.partition('/')[2]}", data)
    return bad


def nodes(table: dict[str, Any]) -> list[dict[str, Any]]:
    return table["graph_module"]["graph"]["nodes"]


def signature(table: dict[str, Any]) -> dict[str, Any]:
    return table["graph_module"]["signature"]


def call(table: dict[str, Any]) -> dict[str, Any]:
    return table["graph_module"]["module_call_graph"][0]["signature"]


def rename_value(table: dict[str, Any], old: str, new: str) -> None:
    table.update(json.loads(json.dumps(table).replace(f'"{old}"', json.dumps(new))))


RUN = "__import__('pathlib').Path({marker!r}).touch()"


def test_an_unchanged_copy_is_read(tmp_path: Path) -> None:
    read_program(edited(tmp_path, lambda table: None))


FAULTS: dict[str, tuple[Edit, str]] = {
    "op from_file": (lambda t: nodes(t)[1].update(target="torch.ops.aten.from_file.default"), "beyond its"),
    "op of a library": (lambda t: nodes(t)[1].update(target="torch.ops.mylib.op.default"), "PyTorch's own"),
    "any attribute of torch": (lambda t: nodes(t)[1].update(target="torch.load"), "not one that"),
    "load_library": (lambda t: nodes(t)[1].update(target="torch.ops.load_library"), "PyTorch's own"),
    "a method of an op": (lambda t: nodes(t)[1].update(target="torch.ops.aten.add.__class__"), "version"),
    "os.system": (lambda t: nodes(t)[1].update(target="os.system"), "PyTorch's own"),
    "operator.methodcaller": (lambda t: nodes(t)[1].update(target="_operator.methodcaller"), "not one that"),
    "a missing argument": (lambda t: nodes(t)[1]["inputs"].pop(0), "lacks its argument"),
    "an unknown argument": (lambda t: nodes(t)[1]["inputs"][0].update(name="x" * 900), "lacks its argument"),
    "an unknown value": (lambda t: nodes(t)[1]["inputs"][0]["arg"].update(as_tensor={"name": "zz"}), "'zz'"),
    "two values": (lambda t: nodes(t)[1]["inputs"][0]["arg"].update(as_int=1), "2 values"),
    "a value twice": (lambda t: nodes(t).append(nodes(t)[1]), "twice"),
    "a custom object": (lambda t: nodes(t)[1]["inputs"][0].update(arg={"as_custom_obj": {}}), "custom_obj"),
    "an input that is an object": (
        lambda t: signature(t)["input_specs"][0].update(
            {"custom_obj": {"arg": {}, "custom_obj_name": "x"}}
        )
        or signature(t)["input_specs"][0].pop("parameter"),
        "custom_obj",
    ),
    "a weight that is missing": (
        lambda t: signature(t)["input_specs"][0]["parameter"].update(parameter_name="nowhere"),
        "missing",
    ),
    "a weight with the name of a method": (
        lambda t: signature(t)["input_specs"][0]["parameter"].update(parameter_name="__class__.x"),
        "__class__",
    ),
    "a weight with the name of the module's graph": (
        lambda t: signature(t)["input_specs"][0]["parameter"].update(parameter_name="_code"),
        "'_code'",
    ),
    "a layer with the name of a method": (
        lambda t: signature(t)["input_specs"][0]["parameter"].update(parameter_name="forward.weight"),
        "'forward.weight'",
    ),
    "fewer specs than inputs": (lambda t: signature(t)["input_specs"].pop(), "does not match"),
    "another nesting": (
        lambda t: call(t).update(in_spec='[1, {"type": null, "context": null, "children_spec": []}]'),
        "structure",
    ),
    "a class among the inputs": (
        lambda t: call(t).update(in_spec=call(t)["in_spec"].replace("builtins.list", "os.path")),
        "os.path",
    ),
    "a deep nesting": (lambda t: call(t).update(in_spec='[1,' + "[" * 10_000), "nested too deeply"),
    "a huge size": (
        lambda t: nodes(t)[-2]["inputs"][-1]["arg"].update(as_sym_ints=[{"as_int": 10**30}]),
        "20 digits",
    ),
    "another major version": (lambda t: t["schema_version"].update(major=9), "version 9"),
    "a number as text": (lambda t: nodes(t)[1].update(target=3), "valid string"),
}  # fmt: skip


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_named_in_one_short_line(tmp_path: Path, fault: str) -> None:
    edit, message = FAULTS[fault]
    with pytest.raises(SourceError) as raised:
        read_program(edited(tmp_path, edit))
    assert message in raised.value.args[0]
    assert len(raised.value.args[0]) <= 300
    assert raised.value.hint


def test_a_program_of_too_many_nodes_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ampaudit.source.pt2.graph._MAX_NODES", 3)
    with pytest.raises(SourceError, match="more than 3 nodes"):
        read_program(edited(tmp_path, lambda table: None))


REFUSED = {"guards", "range", "expression", "argument name"}


@pytest.mark.parametrize(
    "place",
    ["guards", "range", "expression", "value name", "metadata", "argument name", "enum", "defaultdict"],
)
def test_text_that_torch_would_evaluate_is_never_run(tmp_path: Path, place: str) -> None:
    marker = tmp_path / "ran"
    payload = RUN.format(marker=str(marker))

    def edit(table: dict[str, Any]) -> None:
        graph = table["graph_module"]["graph"]
        if place == "guards":
            table["guards_code"] = [payload]
        elif place == "range":
            table["range_constraints"] = {payload: {"min_val": 1, "max_val": 2}}
        elif place == "expression":
            for value in graph["sym_int_values"].values():
                value.update(as_expr={"expr_str": payload, "hint": None})
        elif place == "value name":
            rename_value(table, "x", f"x): {payload}\n#")
        elif place == "metadata":
            table["graph_module"]["metadata"] = {"custom": payload}
            nodes(table)[1]["metadata"].update(torch_fn=payload, from_node=payload, source_fn_stack=payload)
        elif place == "argument name":
            nodes(table)[1]["inputs"][0]["name"] = f"x={payload}, y"
        elif place == "enum":
            context = json.dumps({"__enum__": True, "fqn": "antigravity:x", "name": payload})
            call(table)["out_spec"] = call(table)["out_spec"].replace('"null"', json.dumps(context))
        elif place == "defaultdict":
            context = {
                "default_factory_module": "antigravity",
                "default_factory_name": "x",
                "dict_context": [],
            }
            kind = call(table)["in_spec"].replace("builtins.dict", "collections.defaultdict")
            call(table)["in_spec"] = kind.replace('"[]"', json.dumps(context))

    try:
        source = open_source(str(edited(tmp_path, edit)), SourceConfig())
        batch = source.batches[0]
        source.model(*batch.args, **batch.kwargs)
    except SourceError:
        assert place in REFUSED
    else:
        assert place not in REFUSED  # it is not read, or its text is a name that is replaced
    assert not marker.exists()


EVALUATED = [
    "__import__('os')",
    "(1).__class__",
    "open('x')",
    "x.__class__",
    "lambda: 0",
    "f'{1}'",
    "a.b",
    "1;2",
]
EVALUATED += ["[1 for x in y]", "os.system('x')", "L['x'].size.__self__", "(" * 900, "Max(x=y)", "", "x := 1"]


@pytest.mark.parametrize("text", EVALUATED)
def test_an_expression_over_sizes_is_no_other_code(text: str) -> None:
    with pytest.raises(ValueError, match="holds something else"):
        check_expression(text)


def test_expressions_of_torch_are_accepted() -> None:
    class Sizes(nn.Module):
        def forward(self, x: torch.Tensor) -> Any:
            y = nn.functional.interpolate(x[None, None], scale_factor=1.5)
            halves = torch.arange(x.shape[0] // 2 + 1)
            return y, halves, x.repeat(3, 1)[::2], nn.functional.pad(x, (0, max(0, 5 - x.shape[1])))

    dynamic = torch.export.Dim.DYNAMIC
    stream = io.BytesIO()
    program = torch.export.export(Sizes(), (torch.randn(6, 4),), dynamic_shapes=({0: dynamic, 1: dynamic},))
    torch.export.save(program, stream)
    with zipfile.ZipFile(stream) as archive:
        (name,) = (n for n in archive.namelist() if n.endswith("models/model.json"))
        text = archive.read(name).decode()
    found = {json.loads(quoted) for quoted in re.findall(r'"expr_str": ("(?:[^"\\]|\\.)*")', text)}
    assert len(found) > 10
    for expression in (*found, *json.loads(text)["range_constraints"]):
        check_expression(expression)
    for guard in ("L['x'].size()[0] >= 2", "2 <= L['x'][0].stride()[1] and not (Mod(s0, 2) == 0)"):
        check_expression(guard)


@pytest.mark.parametrize(
    "member",
    ["data/aotinductor/model/x.so", "data/constants/../../x", "models/x/y.json", "code/x.py", "x.so"],
)
def test_members_that_are_no_part_of_a_program_are_refused(tmp_path: Path, member: str) -> None:
    path = edited(tmp_path, lambda table: None)
    with zipfile.ZipFile(path, "a") as archive:
        archive.writestr(f"bad/{member}", b"\x7fELF")
    with pytest.raises(SourceError) as raised:
        read_program(path)
    assert raised.value.exit_code == 2


PAYLOADS: dict[str, tuple[Callable[[dict[str, Any]], None], str]] = {
    "pickled": (lambda p: p.update(use_pickle=True), "Python object"),
    "another folder": (lambda p: p.update(path_name="../../../../etc/passwd"), "Python object"),
    "another member": (lambda p: p.update(path_name="weight_99"), "weight_99"),
    "too large": (lambda p: p["tensor_meta"].update(sizes=[{"as_int": 10**9}] * 2), "needs more"),
    "repeated": (
        lambda p: p["tensor_meta"].update(
            sizes=[{"as_int": 10**5}] * 2, strides=[{"as_int": 0}, {"as_int": 0}]
        ),
        "claims",
    ),
    "400,000 dimensions": (
        lambda p: p["tensor_meta"].update(sizes=[{"as_int": 1}] * 400_000, strides=[{"as_int": 1}] * 400_000),
        "at most 64",
    ),
    "negative": (lambda p: p["tensor_meta"].update(storage_offset={"as_int": -1}), "greater than or equal"),
    "an expression": (
        lambda p: p["tensor_meta"].update(sizes=[{"as_expr": {"expr_str": "s0"}}]),
        "as_",
    ),
    "an unknown type": (lambda p: p["tensor_meta"].update(dtype=99), "dtype"),
    "sparse": (lambda p: p["tensor_meta"].update(layout=1), "layout"),
}


EXAMPLES = [(1, {}), ("abc", {}), ((), {1: 2}), ((), []), [(), {}], ((),), torch.ones(2)]


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_example_inputs_must_be_arguments(tmp_path: Path, example: object) -> None:
    stream = io.BytesIO()
    torch.save(example, stream)
    path = edited(tmp_path, lambda table: None, example=stream.getvalue())
    with pytest.raises(SourceError, match="its example inputs are not"):
        read_program(path)


@pytest.mark.parametrize("fault", PAYLOADS)
def test_a_table_of_weights_must_fit_its_bytes(tmp_path: Path, fault: str) -> None:
    change, message = PAYLOADS[fault]
    path = edited(
        tmp_path,
        lambda table: change(table["config"]["linear.weight"]),
        "data/weights/model_weights_config.json",
    )
    with pytest.raises(SourceError) as raised:
        read_program(path)
    assert message in raised.value.args[0]
    assert len(raised.value.args[0]) <= 300


def test_trust_hands_the_file_to_torch_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = saved(everything(), tmp_path / "m.pt2")
    plain, trusted = (open_source(str(path), SourceConfig(trust=trust)) for trust in (False, True))
    assert "may run code" in capsys.readouterr().err
    found = []
    for source in (plain, trusted):
        torch.manual_seed(0)
        found.append(source.model(*source.batches[0].args, **source.batches[0].kwargs))
    for one, other in zip(*(pytree.tree_leaves(f) for f in found), strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("name", ["_operator.pow", "_operator.lshift"])
def test_a_size_cannot_fill_the_memory(name: str) -> None:
    with pytest.raises(SourceError, match="64 bits"):
        operator_named(name)(10**9, 10**9)
    square = operator_named("_operator.mul")
    with pytest.raises(SourceError, match="64 bits"):
        reduce(lambda value, _: square(value, value), range(64), 10**9)


@pytest.mark.parametrize(
    ("name", "left", "right"),
    [("mod", "%999999d", 1), ("mul", [1], 2), ("mul", 2, "a"), ("add", [1], [1]), ("add", (1,), (1,))],
)
def test_text_and_lists_cannot_fill_the_memory(name: str, left: Any, right: Any) -> None:
    with pytest.raises(SourceError, match="text or lists"):
        operator_named(f"_operator.{name}")(left, right)


def test_no_operator_that_takes_a_file_can_be_named() -> None:
    for schema in torch._C._jit_get_all_schemas():
        if any(a.name == "filename" or "Storage" in str(a.type) for a in schema.arguments):
            name = f"torch.ops.{schema.name.replace('::', '.')}.{schema.overload_name or 'default'}"
            with pytest.raises(UnknownOperator):
                operator_named(name)


UNSAFE = [
    "mul.left_t",  # [0] * 10**18
    "manual_seed.default",
    "set_grad_enabled.default",
    "str.default",
    "sparse_coo_tensor.indices_size",  # indices are not checked
    "to_sparse.default",  # whose indices can be changed
    "_cholesky_solve_helper.out",  # this one and the following were seen to crash
    "_fft_c2c.out",
    "_foreach_copy.default",
    "_new_zeros_with_same_feature_meta.default",
    "_nnpack_spatial_convolution.default",
    "_stack.default",
    "_sobol_engine_initialize_state_.default",
    "fbgemm_pack_gemm_matrix_fp16.default",
    "fractional_max_pool3d_backward.default",
    "native_batch_norm_backward.out",
    "quantized_lstm_cell.default",
    "reflection_pad2d_backward.default",
]


@pytest.mark.parametrize("name", UNSAFE)
def test_operators_that_change_the_process_or_crash_are_refused(name: str) -> None:
    packet, overload = name.split(".")
    assert hasattr(getattr(torch.ops.aten, packet), overload)
    with pytest.raises(UnknownOperator, match="reaches beyond"):
        operator_named(f"torch.ops.aten.{name}")


@pytest.mark.parametrize("line", ["3", "9" * 5_000, "٣"])
def test_the_files_that_a_program_names_are_not_opened(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, line: str
) -> None:
    named = tmp_path / "named.py"
    named.write_text("# ampaudit: ignore[AMP102] because\n" * 5)
    opened: list[str] = []
    real = os.open
    monkeypatch.setattr(os, "open", lambda path, *rest: opened.append(str(path)) or real(path, *rest))

    def edit(table: dict[str, Any]) -> None:
        for node in nodes(table):
            node["metadata"]["stack_trace"] = f'  File "{named}", line {line}, in forward\n    y = x'

    path = edited(tmp_path, edit)
    report = scan(open_source(str(path), SourceConfig()), advise=True, diff=True)
    assert str(path) in opened
    assert str(named) not in opened
    assert any(site.source is not None for site in report.sites) == (line == "3")


@pytest.mark.parametrize(
    "part", ["class", 'a"b', "a\\b", "a\nb", "a\u2028b", "\ufb01", "__a", "", "x" * 501, "forward"]
)
def test_names_that_torchs_code_would_not_read_as_one_are_refused(part: str) -> None:
    with pytest.raises(ValueError, match="a weight has the name"):
        attribute_path(f"a.{part}.weight")
