"""Every kind of source, and every kind of bad one."""

from __future__ import annotations

import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from ampaudit import scan
from ampaudit.cli.loading import load_source
from ampaudit.core import forkserver
from ampaudit.core.errors import AuditError, InputError, SourceError, WeightsError
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import MAX_MESSAGE
from ampaudit.export.config import ConvertConfig
from ampaudit.export.convert import convert
from ampaudit.source.open import open_source
from tests.support.zoo import ZOO

Write = Callable[..., Path]
MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)
    def forward(self, x, scale=1.0):
        return self.inner(x) * scale
"""
INPUTS = "def example_inputs():\n    return torch.randn(2, 8)\n"


def test_a_python_file_with_one_model(model_file: Write) -> None:
    source = open_source(str(model_file(MODEL + INPUTS)), SourceConfig(batches=3))
    assert type(source.model).__name__ == "Net"
    assert not source.model.training
    assert len(source.batches) == 3
    assert source.sha256
    assert not torch.equal(source.batches[0].args[0], source.batches[1].args[0])


@pytest.mark.parametrize(
    ("body", "args", "kwargs"),
    [
        ("def example_inputs():\n    return (torch.ones(2, 8), 2.0)\n", 2, set()),
        ("def example_inputs():\n    return {'x': torch.ones(2, 8)}\n", 0, {"x"}),
        (INPUTS + "def example_kwargs():\n    return {'scale': 3.0}\n", 1, {"scale"}),
        ("def batches():\n    while True:\n        yield torch.ones(2, 8)\n", 1, set()),
    ],
)
def test_forms_of_inputs(model_file: Write, body: str, args: int, kwargs: set[str]) -> None:
    source = open_source(str(model_file(MODEL + body)), SourceConfig(batches=2))
    assert len(source.batches) == 2
    assert len(source.batches[0].args) == args
    assert set(source.batches[0].kwargs) == kwargs
    assert scan(source.model, batches=source.batches).exit_code == 0


def test_a_named_factory_and_an_import_path(model_file: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    path = model_file(MODEL + INPUTS + "def build():\n    return Net().train()\n", "some_models.py")
    assert type(open_source(f"{path}:build", SourceConfig()).model).__name__ == "Net"
    monkeypatch.chdir(path.parent)
    source = open_source("some_models:build", SourceConfig(train=True))
    assert source.kind == "import"
    assert source.model.training


def test_the_same_seed_gives_the_same_weights_and_inputs(model_file: Write) -> None:
    path = str(model_file(MODEL + INPUTS))
    first, second, other = (open_source(path, SourceConfig(seed=s)) for s in (1, 1, 2))
    assert torch.equal(first.model.inner.weight, second.model.inner.weight)
    assert torch.equal(first.batches[0].args[0], second.batches[0].args[0])
    assert not torch.equal(first.model.inner.weight, other.model.inner.weight)


def test_a_hugging_face_directory(tmp_path: Path) -> None:
    ZOO["bert"]().model.save_pretrained(tmp_path / "model")
    source = open_source(str(tmp_path / "model"), SourceConfig())
    assert source.kind == "huggingface"
    assert scan(source.model, batches=source.batches).exit_code == 0


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the fork server")
def test_the_program_starts_the_server_that_the_rehearsal_uses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ZOO["bert"]().model.save_pretrained(tmp_path / "model")
    servers: dict[object, Any] = {}
    monkeypatch.setattr(forkserver, "_servers", lambda: servers)
    load_source(str(tmp_path / "model"), SourceConfig())
    (server,) = servers.values()
    assert len(server._children) == 1
    server.stop()


@pytest.mark.parametrize("name", ["vit", "t5", "gpt2"])
def test_inputs_are_made_for_other_directories(tmp_path: Path, name: str) -> None:
    ZOO[name]().model.save_pretrained(tmp_path / "model")
    source = open_source(str(tmp_path / "model"), SourceConfig())
    assert scan(source.model, batches=source.batches, ranges=True).coverage.measured > 20


class Scaled(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
        self.head = nn.Linear(8, 2)

    def forward(self, x: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"y": self.head(self.encoder(x)) * scale}


@pytest.mark.parametrize("policy", ["onnx", "tensorflow", "modelopt"])
def test_an_exported_program_under_a_policy_of_level_graph(tmp_path: Path, policy: str) -> None:
    model = Scaled().eval()
    inputs = (torch.randn(2, 8),), {"scale": torch.tensor(2.0)}
    path = tmp_path / "model.pt2"
    torch.export.save(torch.export.export(model, *inputs, strict=False), path)
    source = open_source(str(path), SourceConfig())
    exported = scan(source.model, batches=source.batches, policy=policy)
    alive = scan(model, {"x": inputs[0][0], **inputs[1]}, policy=policy)
    kinds = ({s.site: (s.precision, s.rule, s.layer, s.source) for s in r.sites} for r in (exported, alive))
    ours, theirs = kinds
    assert ours == theirs
    assert ours["head/linear"][0] == "float16"


def test_an_exported_program_keeps_layers_lines_and_values(tmp_path: Path) -> None:
    model = Scaled().eval()
    inputs = (torch.randn(2, 8),), {"scale": torch.ones(1)}
    torch.export.save(torch.export.export(model, *inputs, strict=False), tmp_path / "m.pt2")
    source = open_source(str(tmp_path / "m.pt2"), SourceConfig())
    for policy in ("torch-cuda", "half"):
        exported = scan(source.model, batches=source.batches, policy=policy)
        live = scan(model, {"x": inputs[0][0], "scale": inputs[1]["scale"]}, policy=policy)
        assert [(s.site, s.precision, s.rule) for s in exported.sites] == [
            (s.site, s.precision, s.rule) for s in live.sites
        ]
        line = next(s.source for s in exported.sites if s.site == "head/linear")
        assert line is not None
        assert line.file == __file__


def test_weights_from_both_kinds_of_checkpoint(model_file: Write, tmp_path: Path) -> None:
    path = str(model_file(MODEL + INPUTS))
    state = {"inner.weight": torch.full((4, 8), 2.0), "inner.bias": torch.zeros(4)}
    save_file(state, tmp_path / "w.safetensors")
    torch.save(state, tmp_path / "w.pt")
    torch.save({"state_dict": state, "epoch": 3}, tmp_path / "wrapped.pt")
    for name in ("w.safetensors", "w.pt", "wrapped.pt"):
        source = open_source(path, SourceConfig(weights=tmp_path / name))
        assert torch.equal(source.model.inner.weight, state["inner.weight"])


@pytest.mark.parametrize("trust", [False, True])
def test_random_values_of_a_directory_are_told(tmp_path: Path, trust: bool) -> None:
    model = ZOO["bert"]().model
    model.save_pretrained(tmp_path / "hf")
    state = model.state_dict()
    save_file(state, tmp_path / "all.safetensors")
    del state["pooler.dense.weight"], state["pooler.dense.bias"]
    save_file(state, tmp_path / "hf" / "model.safetensors", {"format": "pt"})
    options = SourceConfig(trust=trust)
    (note,) = open_source(str(tmp_path / "hf"), options).notes
    assert note.endswith("the weight files lack them: pooler.dense.weight, pooler.dense.bias")
    options = options.changed(weights=tmp_path / "all.safetensors")
    assert not open_source(str(tmp_path / "hf"), options).notes


@pytest.mark.parametrize("trust", [False, True])
def test_weights_that_the_model_does_not_use_are_told(tmp_path: Path, trust: bool) -> None:
    ZOO["bert"]().model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    last = config["num_hidden_layers"] = config["num_hidden_layers"] - 1
    (tmp_path / "config.json").write_text(json.dumps(config))
    (note,) = open_source(str(tmp_path), SourceConfig(trust=trust)).notes
    what, names = note.split(": ")
    assert what == "not used, as config.json describes no such weights"
    assert names.startswith(f"encoder.layer.{last}.attention.output.LayerNorm.bias")


def test_code_of_a_directory_is_audited_if_trusted_and_else_told(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    ZOO["bert"]().model.save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "own.py").write_text(
        "import transformers\nclass BertModel(transformers.BertModel):\n    pass\n"
    )
    told = "this is BertModel of Transformers, not the code that auto_map in config.json names"
    for names, notes in (
        ({"AutoTokenizer": ["own.Tokens", None]}, ()),
        ([1], ()),
        ({"AutoModel": "own.BertModel"}, (told,)),
    ):
        (tmp_path / "config.json").write_text(json.dumps({**config, "auto_map": names}))
        for trust in (False, True):
            source = open_source(str(tmp_path), SourceConfig(trust=trust))
            assert source.notes == (() if trust else notes)
            is_own = type(source.model) is not transformers.BertModel
            assert is_own == (trust and "AutoModel" in names)


OLD = """
class Extra(nn.Linear):
    def get_extra_state(self):
        return {"calls": 3}
    def set_extra_state(self, state):
        self.calls = state.pop("calls")
def get_model():
    normed = nn.utils.parametrizations.weight_norm(nn.Linear(8, 8))
    return nn.Sequential(normed, nn.BatchNorm1d(8), nn.LazyLinear(4), Extra(4, 4)).eval()
"""


@pytest.fixture
def old(tmp_path: Path) -> nn.Module:
    """A model as older versions of its code and of PyTorch saved it, and its weights."""
    with pytest.warns(FutureWarning, match="weight_norm"):
        normed = nn.utils.weight_norm(nn.Linear(8, 8))
    model = nn.Sequential(normed, nn.BatchNorm1d(8), nn.Linear(8, 4), nn.Linear(4, 4)).eval()
    state = dict(model.state_dict())
    del state["1.num_batches_tracked"]
    save_file(state, tmp_path / "old.safetensors")
    save_file(state | {"3._extra_state": torch.ones(2)}, tmp_path / "extra.safetensors")
    return model


def test_a_checkpoint_is_loaded_by_the_load_state_dict_of_the_model(
    model_file: Write, tmp_path: Path, old: nn.Module
) -> None:
    path, x = str(model_file(OLD + INPUTS)), torch.randn(2, 8)
    options = SourceConfig(weights=tmp_path / "old.safetensors")
    assert torch.equal(open_source(path, options).model(x), old(x))
    config = ConvertConfig(policy="half", weights=options.weights)
    convert(open_source(path, options), None, tmp_path / "out", config=config)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert torch.equal(stored["0.parametrizations.weight.original1"], old[0].weight_v.half())


def test_what_load_state_dict_raises_is_told(model_file: Write, tmp_path: Path, old: nn.Module) -> None:
    options = SourceConfig(weights=tmp_path / "extra.safetensors")
    with pytest.raises(WeightsError, match="load_state_dict fails: AttributeError"):
        open_source(str(model_file(OLD + INPUTS)), options)


def test_names_that_do_not_match_are_told_briefly(model_file: Write, tmp_path: Path) -> None:
    strange = {f"\x1b[31m{index}{'x' * 500}": torch.ones(1) for index in range(9)}
    save_file(strange, tmp_path / "w.safetensors")
    state = {"inner.weight": torch.ones(4, 8), "inner.bias": torch.ones(4)}
    save_file(state | strange, tmp_path / "v.safetensors")
    torch.save({"inner.weight": torch.ones((2,) * 60 + (0,)), **strange}, tmp_path / "u.pt")
    path = str(model_file(MODEL + INPUTS))
    for name in ("w.safetensors", "v.safetensors", "u.pt"):
        with pytest.raises(WeightsError, match="does not match the model") as caught:
            open_source(path, SourceConfig(weights=tmp_path / name))
        assert len(caught.value.args[0]) <= MAX_MESSAGE
        assert caught.value.args[0].isprintable()


@pytest.mark.parametrize("prefix", ["module.", "_orig_mod."])
def test_the_prefix_of_a_wrapper_is_named(model_file: Write, tmp_path: Path, prefix: str) -> None:
    state = {f"{prefix}inner.weight": torch.ones(4, 8), f"{prefix}inner.bias": torch.ones(4)}
    hints = []
    for name, tensors in (("w.safetensors", state), ("v.safetensors", {**state, "other": torch.ones(1)})):
        save_file(tensors, tmp_path / name)
        with pytest.raises(WeightsError, match="does not match the model") as caught:
            open_source(str(model_file(MODEL + INPUTS)), SourceConfig(weights=tmp_path / name))
        hints.append(caught.value.hint)
    assert hints == [
        f"remove the prefix '{prefix}' from the checkpoint's names", "pass a checkpoint of this model"
    ]  # fmt: skip


class Hostile:
    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return Path.touch, (self.marker,)  # type: ignore[return-value]


def test_a_hostile_pickle_is_refused_and_does_not_run(model_file: Write, tmp_path: Path) -> None:
    marker = tmp_path / "ran"
    torch.save({"inner.weight": Hostile(marker)}, tmp_path / "bad.pt")
    (tmp_path / "raw.pt").write_bytes(pickle.dumps(Hostile(marker)))
    path = str(model_file(MODEL + INPUTS))
    for name in ("bad.pt", "raw.pt"):
        with pytest.raises(WeightsError, match=r"(would run code|corrupt)"):
            open_source(path, SourceConfig(weights=tmp_path / name))
    assert not marker.exists()


def test_a_hostile_exported_program_is_refused_and_does_not_run(tmp_path: Path) -> None:
    import zipfile

    marker = tmp_path / "ran"
    torch.export.save(
        torch.export.export(Scaled(), (torch.randn(2, 8), torch.ones(1)), strict=False), tmp_path / "m.pt2"
    )
    hostile = tmp_path / "bad.pt2"
    torch.save({"x": Hostile(marker)}, tmp_path / "payload")
    replaced = 0
    with zipfile.ZipFile(tmp_path / "m.pt2") as good, zipfile.ZipFile(hostile, "w") as bad:
        for item in good.infolist():
            data = good.read(item)
            if "sample_inputs" in item.filename:
                data, replaced = (tmp_path / "payload").read_bytes(), replaced + 1
            bad.writestr(item.filename, data)
    assert replaced
    with pytest.raises(SourceError, match=r"(refused|not a readable)"):
        open_source(str(hostile), SourceConfig())
    assert not marker.exists()


def raises(location: str, kind: type[AuditError], message: str, **options: object) -> AuditError:
    with pytest.raises(kind, match=message) as caught:
        open_source(location, SourceConfig(**options))  # type: ignore[arg-type]
    assert caught.value.exit_code == 2
    assert caught.value.hint
    return caught.value


def test_bad_python_files(model_file: Write, tmp_path: Path) -> None:
    raises(str(tmp_path / "none.py"), SourceError, "no such file")
    raises(str(tmp_path / "nothing"), SourceError, "no such file or directory")
    broken = model_file("def f(:\n", "broken.py")
    raises(str(broken), SourceError, r"broken\.py:3: syntax error")
    raises(str(model_file("x = 1\n", "empty.py")), SourceError, "defines no get_model()")
    raises(str(model_file(MODEL, "noinput.py")), SourceError, "no example_inputs")
    two = MODEL + MODEL.replace("Net", "Other") + INPUTS
    raises(str(model_file(two, "two.py")), SourceError, r"several models .*Net, Other")
    raises(str(model_file("import nosuchthing\n", "dep.py")), SourceError, r"dep\.py:3: ModuleNotFound")
    failing = "def get_model():\n    return 1 / 0\n" + INPUTS
    raises(str(model_file(failing, "failing.py")), SourceError, r"failing\.py:4: ZeroDivisionError")
    wrong = "def get_model():\n    return 3\n" + INPUTS
    raises(str(model_file(wrong, "wrong.py")), SourceError, r"returned int, not an nn\.Module")
    raises(f"{model_file(MODEL + INPUTS)}:nosuch", SourceError, "'nosuch' is not defined")
    raises("no.such.module:build", SourceError, "no module named")
    exits = model_file("import sys\nsys.exit(5)\n", "exits.py")
    raises(str(exits), SourceError, r"sys\.exit")


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ("raise type('Skipped', (BaseException,), {})('no GPU here')", r"model\.py:3: Skipped: no GPU here"),
        ("raise type('Odd', (Exception,), {'__str__': lambda self: self.missing})", r"model\.py:3: Odd: Odd"),
        ("x = '\0'", r"model\.py:1: syntax error: .*null bytes"),
    ],
)
def test_anything_that_a_file_raises_is_told_by_its_line(model_file: Write, body: str, message: str) -> None:
    raises(str(model_file(body)), SourceError, message)


@pytest.mark.parametrize("edit", ["sys.path.pop(0)", "sys.path = sys.path[1:]", "sys.path.clear()"])
def test_a_file_may_edit_the_import_path(
    model_file: Write, monkeypatch: pytest.MonkeyPatch, edit: str
) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    kept = list(sys.path)
    path = model_file(f"import sys\n{edit}\n{MODEL}{INPUTS}")
    source = open_source(str(path), SourceConfig())
    assert isinstance(source.model, nn.Module)
    assert sys.path == ([] if "clear" in edit else kept) + [str(path.parent)]


def test_bad_inputs(model_file: Write) -> None:
    raises(
        str(model_file(MODEL + "def batches():\n    return []\n", "a.py")),
        InputError,
        "batches.. yields nothing",
    )
    raises(
        str(model_file(MODEL + "def example_inputs():\n    return 'text'\n", "b.py")),
        InputError,
        "returned str",
    )
    nan = model_file(MODEL + "def example_inputs():\n    return torch.full((2, 8), float('nan'))\n", "c.py")
    source = open_source(str(nan), SourceConfig())
    with pytest.raises(InputError, match=r"input\[0\] of batch 1 holds NaN"):
        scan(source.model, batches=source.batches)


def test_bad_checkpoints(model_file: Write, tmp_path: Path) -> None:
    path = str(model_file(MODEL + INPUTS))
    (tmp_path / "torn.safetensors").write_bytes(b"\x10\x00\x00\x00\x00\x00\x00\x00{broken")
    raises(path, WeightsError, "not a valid safetensors file", weights=tmp_path / "torn.safetensors")
    (tmp_path / "torn.pt").write_bytes(b"PK\x03\x04 nothing here")
    raises(path, WeightsError, r"torn\.pt: (corrupt|holds|not an archive)", weights=tmp_path / "torn.pt")
    raises(path, WeightsError, "No such file", weights=tmp_path / "none.pt")
    code = "raise ValueError('it was imported')"  # which may take minutes
    (tmp_path / "slow.py").write_text(code)
    for name, error in (("weights", WeightsError), ("inputs", InputError)):
        raises(str(tmp_path / "slow.py"), error, "No such file", **{name: tmp_path / "none.pt"})
    save_file(
        {"inner.weight": torch.ones(4, 9), "inner.bias": torch.zeros(4)}, tmp_path / "shape.safetensors"
    )
    raises(path, WeightsError, r"inner\.weight is \(4, 9\)", weights=tmp_path / "shape.safetensors")
    save_file({"inner.weight": torch.ones(4, 8)}, tmp_path / "less.safetensors")
    raises(path, WeightsError, r"missing: inner\.bias", weights=tmp_path / "less.safetensors")
    parallel = {"module.inner.weight": torch.ones(4, 8), "module.inner.bias": torch.ones(4)}
    save_file(parallel, tmp_path / "parallel.safetensors")
    both = r"missing: inner\.weight, inner\.bias; unexpected: module\.inner\."
    raises(path, WeightsError, both, weights=tmp_path / "parallel.safetensors")


def test_bad_directories(tmp_path: Path) -> None:
    raises(str(tmp_path), SourceError, r"no config\.json")
    (tmp_path / "config.json").write_text("{")
    raises(str(tmp_path), SourceError, "not valid JSON")
    (tmp_path / "config.json").write_text(json.dumps({"architectures": ["NoSuchModel"]}))
    raises(str(tmp_path), SourceError, "NoSuchModel")
    (tmp_path / "torn.pt2").write_bytes(b"nothing")
    raises(str(tmp_path / "torn.pt2"), SourceError, r"not (a readable exported program|an archive of torch)")
