"""Recorded calls as batches: the results of the program, and every bad recording refused in a line."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils import _pytree as pytree

import ampaudit
from ampaudit.core.errors import AuditError, InputError, ReferenceBroken
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.untrusted import MAX_MESSAGE
from ampaudit.findings.finding import Severity
from ampaudit.render.render import as_file
from ampaudit.run import runner
from ampaudit.source import Batch
from ampaudit.source.inputs import recorded_calls
from ampaudit.source.user_code import module_from_file
from tests.support.recorded import Pair, Sink

Write = Callable[..., Path]
MODEL = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)
    def forward(self, x, scale=1.0):
        return self.inner(x) * scale
"""


class Net(nn.Module):
    """The module of ``MODEL``."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 4)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.inner(x) * scale


@pytest.fixture
def calls(tmp_path: Path) -> Path:
    """Six calls of ``Net``: of two shapes, the fifth large."""
    net = Net()
    with torch.no_grad():
        net.inner.weight.fill_(1.0)
        net.inner.bias.zero_()
    with ampaudit.record(net, tmp_path / "calls"):
        for number in range(6):
            net(torch.full((1 + number % 2, 8), 30_000.0 if number == 4 else float(number)), 1.0)
    return tmp_path / "calls"


def test_a_model_file_needs_no_inputs_of_its_own(calls: Path, model_file: Write) -> None:
    path = str(model_file(MODEL))
    report = ampaudit.scan(path, source=SourceConfig(inputs=calls))
    assert report.run.batches == 6
    assert report.run.inputs is not None
    assert "6 of 6 recorded calls of Net (calls 1 to 6)" in report.run.inputs.detail
    assert ampaudit.scan(path, source=SourceConfig(inputs=calls, batches=2)).run.batches == 2
    assert ampaudit.plan(path, source=SourceConfig(inputs=calls)).sites
    assert ampaudit.scan(Net(), source=SourceConfig(inputs=calls)).run.batches == 6


def test_calls_of_one_shape_share_a_trace(
    calls: Path, model_file: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    traced: list[Any] = []
    original = runner.trace

    def counting(model: nn.Module, args: Any, *rest: Any, **options: Any) -> Any:
        traced.append(args[0].shape)
        return original(model, args, *rest, **options)

    monkeypatch.setattr(runner, "trace", counting)
    ampaudit.scan(str(model_file(MODEL)), policy="half", source=SourceConfig(inputs=calls))
    assert sorted(traced) == [(1, 8), (2, 8)]


def test_findings_outputs_and_tables_name_the_call(calls: Path, model_file: Write) -> None:
    body = MODEL.replace("__init__()", "__init__()", 1) + (
        "def get_model():\n    net = Net()\n    nn.init.ones_(net.inner.weight)\n    return net\n"
    )
    report = ampaudit.scan(str(model_file(body)), policy="half", source=SourceConfig(inputs=calls))
    (origin,) = [found for found in report.findings if found.origin]
    assert origin.severity is Severity.ERROR
    assert (origin.batch, origin.numbers.rpartition("; ")[2]) == ("call 5", "first in call 5")
    site = next(site for site in report.sites if site.site == origin.site)
    assert site.forward is not None
    assert site.forward.batch == "call 5"
    assert [output.batch for output in report.outputs] == ["call 5"]
    for form in ("markdown", "sarif", "html", "junit", "json"):
        assert "call 5" in as_file(report, form), form
    unnamed = ampaudit.scan(Net(), batches=[torch.ones(1, 8)], policy="half")
    assert {site.forward.batch for site in unnamed.sites if site.forward} == {None}


def test_errors_name_the_call(tmp_path: Path) -> None:
    net = Net()
    with ampaudit.record(net, tmp_path / "calls", every=2):
        for value in (1.0, 2.0, float("inf")):
            net(torch.full((1, 8), value))
    with pytest.raises(InputError, match=r"input\[0\] of call 3 holds NaN or infinity"):
        ampaudit.scan(net, source=SourceConfig(inputs=tmp_path / "calls"))
    with ampaudit.record(net, tmp_path / "more"):
        net(torch.ones(1, 8))
        net(torch.full((1, 8), 1e38), 1e10)
    with pytest.raises(ReferenceBroken, match="in call 2; the first is"):
        ampaudit.scan(net, source=SourceConfig(inputs=tmp_path / "more"))


GENERATED: dict[str, Callable[[], tuple[Any, dict[str, Any]]]] = {
    "dynamic": lambda: (_tiny("GPT2"), {}),
    "static": lambda: (_tiny("GPT2"), {"cache_implementation": "static"}),
    "beams": lambda: (_tiny("GPT2"), {"num_beams": 2}),
    "encoder and decoder": lambda: (_tiny("T5", "ForConditionalGeneration"), {}),
    "sliding window": lambda: (_tiny("Mistral", "ForCausalLM", sliding_window=4), {}),
    "state space": lambda: (_tiny("Mamba", "ForCausalLM"), {}),
}
_SIZES = {
    **{"vocab_size": 50, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2},
    **{"num_attention_heads": 2, "num_key_value_heads": 2, "bos_token_id": 1, "eos_token_id": 49},
}
_OWN = {
    "GPT2": {
        "n_layer": 2,
        "n_head": 2,
        "n_embd": 16,
        "vocab_size": 50,
        "n_positions": 64,
        "eos_token_id": 49,
    },
    "T5": {
        **{"d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 2, "num_heads": 2, "vocab_size": 50},
        **{"decoder_start_token_id": 0, "eos_token_id": 49},
    },
}


def _tiny(name: str, head: str = "LMHeadModel", **more: Any) -> Any:
    torch.manual_seed(0)
    config = getattr(transformers, f"{name}Config")(**(_OWN.get(name, _SIZES) | more))
    return getattr(transformers, f"{name}{head}")(config).eval()


@pytest.mark.parametrize("name", GENERATED)
def test_decoding_steps_give_the_logits_of_the_program(name: str, tmp_path: Path) -> None:
    model, options = GENERATED[name]()
    expected: list[torch.Tensor] = []
    hook = model.register_forward_hook(lambda _, __, output: expected.append(output.logits.clone()))
    ids = torch.tensor([[3, 4, 5, 6, 7, 8]])
    plain = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, **options)
    expected.clear()
    with ampaudit.record(model, tmp_path / "calls") as recording:
        made = model.generate(ids, max_new_tokens=4, do_sample=False, pad_token_id=0, **options)
    hook.remove()
    assert torch.equal(made, plain)
    assert recording.recorded == len(expected) > 2
    batches, _ = recorded_calls(tmp_path / "calls", None, model)
    for batch, logits in zip(batches, expected, strict=True):
        with torch.no_grad():
            # some processors' kernels round by where a tensor lies in memory
            torch.testing.assert_close(model(*batch.args, **batch.kwargs).logits, logits)
    leaves = pytree.tree_leaves(batches[-1].kwargs)
    floats = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.is_floating_point()]
    assert floats, "the cache is an input of the trace, and no constant"


def test_a_generate_of_a_directory(tmp_path: Path) -> None:
    """The weights are those of the directory; one trace serves all steps with a static cache."""
    model, options = GENERATED["static"]()
    model.save_pretrained(tmp_path / "gpt2")
    with ampaudit.record(model, tmp_path / "calls"):
        model.generate(
            torch.tensor([[3, 4, 5]]), max_new_tokens=4, do_sample=False, pad_token_id=0, **options
        )
    report = ampaudit.scan(str(tmp_path / "gpt2"), source=SourceConfig(inputs=tmp_path / "calls"))
    assert (report.exit_code, report.run.batches) == (0, 4)
    assert report.run.inputs is not None
    assert "GPT2LMHeadModel" in report.run.inputs.detail
    assert {o.batch for o in report.outputs} <= {f"call {n}" for n in range(1, 5)} | {None}


POINTS = """
import dataclasses
from collections import namedtuple
@dataclasses.dataclass
class Points:
    places: torch.Tensor
    names: list
    scale: float = 1.0
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2, 2))
    def forward(self, points):
        return points.places @ self.weight * points.scale
"""


def test_a_dataclass_of_the_model_file(model_file: Write, tmp_path: Path) -> None:
    """It is another class of the same name there, and tensors in it are inputs, not constants."""
    script = module_from_file(model_file(POINTS, "script.py"))
    net = script.Net()
    with ampaudit.record(net, tmp_path / "calls"):
        for number in range(3):
            net(script.Points(torch.full((1, 2), float(number)), ["a"], 2.0))
    report = ampaudit.scan(str(model_file(POINTS)), source=SourceConfig(inputs=tmp_path / "calls"))
    peaks = {site.forward.peak for site in report.sites if site.forward and "mul" in site.site}
    assert max(peaks) == 8.0, "of the third call, through the trace of the first"
    without = POINTS.replace("class Points", "class Other").replace("points.places", "points")
    with pytest.raises(InputError, match=r"input\[0\] is of the class _ampaudit_user_script:Points, which"):
        ampaudit.scan(str(model_file(without, "other.py")), source=SourceConfig(inputs=tmp_path / "calls"))


def test_calls_of_a_16_bit_program_for_a_float32_model(tmp_path: Path) -> None:
    half = Net().half()
    values = torch.randn(2, 8).half()
    with ampaudit.record(half, tmp_path / "calls"):
        half(values)
    (batch,), _ = recorded_calls(tmp_path / "calls", None, Net())
    assert batch.args[0].dtype is torch.float32
    assert torch.equal(batch.args[0], values.float())
    (kept,), _ = recorded_calls(tmp_path / "calls", None, Net().half())
    assert kept.args[0].dtype is torch.float16
    net = Net()
    with torch.autocast("cpu", torch.bfloat16), ampaudit.record(net, tmp_path / "inside"):
        net(torch.ones(1, 8, dtype=torch.bfloat16))
    (inside,), _ = recorded_calls(tmp_path / "inside", None, net)
    assert inside.args[0].dtype is torch.bfloat16, "what autocast gave to a submodule"


def _edited(name: str, change: Callable[[Any], object]) -> Callable[[Path], object]:
    def edit(directory: Path) -> None:
        path = directory / name
        table = json.loads(path.read_text())
        change(table)
        path.write_text(json.dumps(table))

    return edit


def _first(**fields: Any) -> Callable[[Path], object]:
    return _edited("call-000001.json", lambda call: call["args"][0].update(fields))


def _argument(value: Any) -> Callable[[Path], object]:
    return _edited("call-000001.json", lambda call: call["args"].__setitem__(1, value))


def _cut(name: str, size: int) -> Callable[[Path], object]:
    return lambda directory: (directory / name).write_bytes((directory / name).read_bytes()[:size])


def _header(**fields: Any) -> Callable[[Path], object]:
    def edit(directory: Path) -> None:
        path = directory / "call-000001.safetensors"
        data = path.read_bytes()
        (length,) = struct.unpack("<Q", data[:8])
        table = json.loads(data[8 : 8 + length])
        table["0"].update(fields)
        text = json.dumps(table).encode()
        path.write_bytes(struct.pack("<Q", len(text)) + text + data[8 + length :])

    return edit


JSON, VALUES = "call-000001.json", "call-000001.safetensors"
DEEP: Any = 1
for _ in range(60):
    DEEP = {"tuple": [DEEP]}
BAD: dict[str, tuple[Callable[[Path], object], str]] = {
    "no description": (lambda d: (d / "recording.json").unlink(), "no recording.json"),
    "a cut description": (_cut("recording.json", 100), "not valid JSON"),
    "another kind": (_edited("recording.json", lambda t: t.update(kind="scan")), "kind"),
    "a later schema": (_edited("recording.json", lambda t: t.update(schema=2)), "schema"),
    "no totals": (_edited("recording.json", lambda t: t.pop("calls")), "calls"),
    "another model": (
        _edited("recording.json", lambda t: t["parameters"].update(sha256="0" * 64)), "calls of another model"
    ),
    "no call": (lambda d: [file.unlink() for file in d.glob("call-*")], "holds no call"),
    "a call is missing": (lambda d: (d / "call-000002.json").unlink(), "5 calls of 6"),
    "a call of another number": (_edited(JSON, lambda t: t.update(call=7)), "describes call 7"),
    "a cut call": (_cut(JSON, 60), "not valid JSON"),
    "cut tensors": (_cut(VALUES, 90), "safetensors"),
    "no tensors": (lambda d: (d / VALUES).unlink(), "not in the file beside it"),
    "a larger shape": (_first(shape=[4, 8]), "more than the 8 values that are stored"),
    "a large offset": (_first(offset=1 << 40), "more than the 8 values that are stored"),
    "a negative stride": (_first(stride=[-8, 1]), "stride"),
    "few strides": (_first(stride=[1]), "not a tensor of"),
    "an unknown dtype": (_first(dtype="float12"), "not a tensor of float12"),
    "a function as dtype": (_first(dtype="save"), "not a tensor of save"),
    "more than memory": (_first(shape=[1 << 40, 8], stride=[0, 1]), "of memory"),
    "more than any memory": (_first(shape=[1 << 62, 8], stride=[0, 1]), "claims"),
    "an unknown field": (_first(pickled=True), "pickled"),
    "another type in the header": (_header(dtype="F64"), "safetensors"),
    "an unknown kind": (_argument({"pickle": "gASV"}), "unknown kind"),
    "two kinds": (_argument({"tuple": [], "list": []}), "not one value"),
    "a class that runs": (_argument({"dataclass": ["subprocess:Popen", {"args": "id"}]}), "does not know"),
    "an object that runs": (_argument({"object": ["os:_wrap_close", {}]}), "does not know"),
    "a class to import": (_argument({"class": "antigravity:x"}), "does not know"),
    "an enum of a module": (_argument({"enum": ["signal:Signals", "SIGKILL"]}), "does not know"),
    "a name of a number": (_argument({"enum": [3, 4]}), "does not know"),
    "bytes without sense": (_argument({"bytes": "xyz"}), "not a valid bytes"),
    "a set of lists": (_argument({"set": [[1]]}), "not a valid set"),
    "a dict of texts": (_argument({"dict": ["ab", "cde"]}), "not a valid dict"),
    "a large range": (_argument({"range": [1, 2, 0]}), "not a valid range"),
    "a size of texts": (_argument({"size": ["a"]}), "not a valid size"),
    "a dtype that is none": (_argument({"dtype": "save"}), "not a valid dtype"),
    "deep": (_argument(DEEP), "nested more than 100 deep"),
    "markup": (_argument({"\x1b[31m\n::error::": 1}), "unknown kind"),
    "a link to a device": (
        lambda d: ((d / JSON).unlink(), (d / JSON).symlink_to("/dev/zero")), "not a regular file"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_bad_recordings(name: str, calls: Path) -> None:
    edit, words = BAD[name]
    edit(calls)
    with pytest.raises(AuditError) as caught:
        recorded_calls(calls, None, Net())
    assert isinstance(caught.value, InputError)
    message = str(caught.value.args[0])
    assert words in message
    assert len(message) <= MAX_MESSAGE + len(str(calls))
    assert message.isprintable()


def test_the_honest_recording_is_read(calls: Path) -> None:
    """The edits above are what is refused."""
    batches, _ = recorded_calls(calls, None, Net())
    assert [batch.name for batch in batches] == [f"call {n}" for n in range(1, 7)]
    assert [batch.args[0].shape[0] for batch in batches] == [1, 2, 1, 2, 1, 2]


def test_an_unfinished_recording_is_read(calls: Path) -> None:
    _edited("recording.json", lambda table: table.update(calls=None))(calls)
    (calls / "call-000006.json").unlink()
    batches, _ = recorded_calls(calls, None, Net())
    assert len(batches) == 5


def test_recordings_of_several_modules(tmp_path: Path) -> None:
    net = Net()
    with ampaudit.record({"net": net, "net.inner": net.inner}, tmp_path / "calls"):
        net(torch.ones(1, 8))
    with pytest.raises(InputError, match=r"recordings of net, net\.inner|give one of these") as caught:
        recorded_calls(tmp_path / "calls", None, net)
    assert "net, net.inner" in caught.value.hint
    assert len(recorded_calls(tmp_path / "calls/net.inner", None, net.inner)[0]) == 1
    with pytest.raises(InputError, match="calls of another model: Net with 2 parameters, recorded as net"):
        recorded_calls(tmp_path / "calls/net", None, nn.Linear(8, 4))


def test_a_batch_that_is_written_to_does_not_change_the_recording(calls: Path) -> None:
    files = {file: file.read_bytes() for file in calls.iterdir()}
    batches, _ = recorded_calls(calls, None, Net())
    batches[0].args[0].fill_(7.0)
    assert {file: file.read_bytes() for file in calls.iterdir()} == files
    again, _ = recorded_calls(calls, None, Net())
    assert again[0].args[0].eq(0).all()


def test_a_cache_is_no_argument_of_another_kind_of_model(tmp_path: Path) -> None:
    """A recording that names a class of Transformers does not make it known."""
    sink = Sink()
    with ampaudit.record(sink, tmp_path / "calls"):
        sink(transformers.DynamicCache())
        sink(Pair(torch.ones(1)))
    with pytest.raises(InputError, match="does not know"):
        recorded_calls(tmp_path / "calls", None, sink)


def test_conversions_take_a_recording(calls: Path, model_file: Write, tmp_path: Path) -> None:
    """As does the converted program, whose parameters have other names."""
    ampaudit.convert(str(model_file(MODEL)), output=tmp_path / "out", source=SourceConfig(inputs=calls))
    options = SourceConfig(inputs=calls, batches=1)
    assert ampaudit.scan(str(tmp_path / "out"), source=options).exit_code == 0


def test_gradients_of_recorded_calls(calls: Path, model_file: Write) -> None:
    body = MODEL + "def loss(output):\n    return output.square().mean()\n"
    options = SourceConfig(inputs=calls, batches=2, train=True)
    report = ampaudit.scan(str(model_file(body)), source=options, backward=True)
    assert report.backward is not None
    assert len(report.backward.losses) == 2


def test_batches_keep_their_names() -> None:
    batch = Batch((torch.ones(1),), name="call 3")
    assert batch.mapped(torch.neg).name == "call 3"
    assert (batch.title(0), Batch().title(0)) == ("call 3", "batch 1")
