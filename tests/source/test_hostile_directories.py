"""Model directories that name code, kernels, other files or absurd sizes: refused, and nothing runs."""

from __future__ import annotations

import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch

from ampaudit.core.errors import AuditError, InputError, SourceError
from ampaudit.core.source_config import SourceConfig
from ampaudit.source.huggingface import rehearse
from ampaudit.source.model_config import read_model_config
from ampaudit.source.open import open_source
from ampaudit.source.processor import random_input
from tests.support.zoo import ZOO

Cli = Callable[..., subprocess.CompletedProcess[str]]
CODE = """import os
import resource
open({marker!r}, "w").close()
from transformers import BertConfig, BertModel
class OwnConfig(BertConfig):
    model_type = "own"
class OwnModel(BertModel):
    config_class = OwnConfig
"""


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("honest")
    torch.manual_seed(0)
    for name in ("bert", "vit"):
        ZOO[name]().model.save_pretrained(place / name)
    return place


@pytest.fixture
def crafted(honest: Path, tmp_path: Path) -> Callable[..., Path]:
    """A directory whose config.json has other values; ``...`` removes a key."""

    def made(source: str = "bert", **values: Any) -> Path:
        path = Path(shutil.copytree(honest / source, tmp_path / "model"))
        table = json.loads((path / "config.json").read_text())
        table |= values
        table = {key: value for key, value in table.items() if value is not ...}
        (path / "config.json").write_text(json.dumps(table))
        return path

    return made


@pytest.fixture
def marker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file that payloads write; nobody is asked, and no connection is opened."""

    def never(*_: Any) -> Any:
        raise AssertionError("asked, or connected")

    monkeypatch.setattr("builtins.input", never)
    monkeypatch.setattr(socket.socket, "connect", never)
    monkeypatch.setattr(socket, "getaddrinfo", never)
    yield tmp_path / "ran"
    assert not (tmp_path / "ran").exists()


def refused(path: Path, words: str, error: type[AuditError] = SourceError, **options: Any) -> None:
    with pytest.raises(error, match=words) as caught:
        open_source(str(path), SourceConfig(**options))
    message = str(caught.value.args[0])
    assert len(message) <= 300
    assert message.isprintable()
    assert caught.value.exit_code == 2


REFERENCES = [
    ({"_attn_implementation": "org/kernel"}, "_attn_implementation names a kernel"),
    ({"attn_implementation": "org/kernel@main:x"}, "attn_implementation names a kernel"),
    ({"attn_implementation": {"text_config": "org/kernel"}}, "names a kernel"),
    ({"_attn_implementation_internal": "../kernel"}, "names a kernel"),
    ({"experts_implementation": ["org/kernel"]}, "names a kernel"),
    ({"text_config": {"vision": [{"_attn_implementation": "o/k"}]}}, r"text_config\.vision\._attn_imp"),
    ({"configuration_files": ["config.4.0.0.json"]}, "configuration_files names other files"),
    ({"transformers_weights": "../secret.safetensors"}, "names other weights"),
    ({"transformers_weights": "pytorch_model.bin"}, "names other weights"),
    ({"quantization_config": {"quant_method": "evil\x1b[31m"}}, r"a quantization, 'evil\\+x1b"),
    ({"quantization_config": {"load_in_8bit": True}}, "a quantization"),
    ({"vision_config": {"quantization_config": {"quant_method": "torchao"}}}, "'torchao'"),
    ({"torch_dtype": "load"}, "torch_dtype is not a floating-point type: 'load'"),
    ({"dtype": {"": "float16"}}, "dtype is not a floating-point type"),
    ({"dtype": "int8"}, "dtype is not a floating-point type"),
    ({"__dict__": {"a": 1}}, "__dict__ is not the name of a setting"),
    ({"sub": {"__class__": "x"}}, r"sub\.__class__ is not"),
    ({"architectures": ["pipeline"]}, "architecture 'pipeline' is not a class name"),
    ({"architectures": ["os.system"]}, "'os.system' is not a class name"),
    ({"architectures": ["\u202eevil"]}, r"u202eevil"),
    ({"architectures": "BertModel"}, "architectures is not a short list"),
    ({"architectures": ["BertModel"] * 1000}, "architectures is not a short list"),
    ({"architectures": [{"a": 1}]}, "is not a class name"),
]


@pytest.mark.parametrize(("values", "words"), REFERENCES, ids=lambda value: str(value)[:40])
def test_what_names_something_else_is_refused(
    crafted: Callable[..., Path], marker: Path, values: dict[str, Any], words: str
) -> None:
    refused(crafted(**values), words)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (b"", "not valid JSON"),
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[]", "not a JSON object"),
        (b'{"a": 1, "a": 2}', "occurs twice"),
        (b'{"a": ' + b"[" * 500 + b"]" * 500 + b"}", "nested"),
        (b'{"a": ' + b"[" * 200_000, "nested"),
        (b" " * 17_000_000, "larger than"),
    ],
    ids=["empty", "bytes", "list", "twice", "deep", "very deep", "large"],
)
def test_what_is_not_a_configuration_is_refused(
    crafted: Callable[..., Path], text: bytes, words: str
) -> None:
    path = crafted()
    (path / "config.json").write_bytes(text)
    refused(path, words)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no FIFOs")
@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
@pytest.mark.parametrize(
    "kind",
    ["fifo", "device", "folder", "nowhere"],
)
def test_what_is_no_file_is_refused(crafted: Callable[..., Path], name: str, kind: str) -> None:
    path = crafted() / name
    path.unlink()
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "/nowhere")
    refused(path.parent, "not a regular file|contains neither|has no config.json|no such", AuditError)


def test_an_adapter_is_refused(crafted: Callable[..., Path], tmp_path: Path, marker: Path) -> None:
    path = crafted()
    (path / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": str(tmp_path)}))
    refused(path, "holds an adapter")


UNBUILDABLE: list[tuple[str, dict[str, Any], str]] = [
    ("bert", {"hidden_size": -4}, "negative dimension"),
    ("bert", {"hidden_size": 1.5}, "hidden_size"),
    ("bert", {"vocab_size": 2**62}, "(?i)overflow"),
    ("bert", {"hidden_act": "evil"}, "evil"),
    ("bert", {"architectures": ["AutoTokenizer"]}, "'AutoTokenizer' is not in this version"),
    ("bert", {"architectures": ["PreTrainedModel"]}, "'PreTrainedModel' is not in this version"),
    ("bert", {"architectures": [], "model_type": "evil"}, "model type `evil`"),
    ("bert", {"get_text_config": "x"}, "text_config|not callable"),
]


@pytest.mark.parametrize(("source", "values", "words"), UNBUILDABLE, ids=lambda value: str(value)[:40])
def test_what_cannot_be_built_fails_in_the_rehearsal(
    crafted: Callable[..., Path],
    marker: Path,
    source: str,
    values: dict[str, Any],
    words: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table = read_model_config(crafted(source, **values))
    monkeypatch.chdir(tmp_path)
    with pytest.raises(Exception, match=words):  # the sandbox makes one kind of them
        rehearse({"table": table, "directory": "", "inputs": None})()


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"id2label": ..., "num_labels": 10**8}, "takes (too much memory|more than)"),
        ({"architectures": [], "model_type": "evil\x1b"}, r"model type `evil\\x1b"),
        ({"hidden_size": 10**9}, "describes a model of 36 EB; its weights are 151 kB"),
        ({"hidden_size": 64}, "other shapes than config.json describes"),
        (
            {
                "architectures": ["DetrModel"],
                "model_type": "detr",
                "backbone": "org/repo",
                "use_timm_backbone": False,
                "backbone_config": None,
            },
            "offline mode|open a connection",
        ),
    ],
    ids=["memory", "unknown", "large", "other shapes", "hub"],
)
def test_what_cannot_be_built_is_refused(
    crafted: Callable[..., Path], marker: Path, values: dict[str, Any], words: str
) -> None:
    refused(crafted(**values), words)


@pytest.mark.parametrize("size", [10**5, [1 << 40, 1], "x", -1, True])
def test_example_inputs_of_absurd_sizes_are_refused(size: Any) -> None:
    config = SimpleNamespace(image_size=size, num_channels=3)
    with pytest.raises(InputError, match=r"too large|not a size"):
        random_input(SimpleNamespace(config=config), "pixel_values", 2)
    config = SimpleNamespace(vocab_size=size if size != 10**5 else 1 << 40, max_position_embeddings=8)
    with pytest.raises(InputError, match=r"for vocab_size is not a size"):
        random_input(SimpleNamespace(config=config), "input_ids", 2)


def own_code(path: Path, marker: Path, **values: Any) -> None:
    """Give a directory a model of its own, as they are published."""
    text = CODE.format(marker=str(marker))
    for name in ("own", "generate"):
        (path / f"{name}.py").write_text(text)
    (path / "custom_generate").mkdir()
    (path / "custom_generate" / "generate.py").write_text(text)
    table = json.loads((path / "config.json").read_text())
    table["auto_map"] = {"AutoConfig": "own.OwnConfig", "AutoModel": "own.OwnModel"}
    (path / "config.json").write_text(json.dumps(table | values))


def test_code_in_a_directory_is_refused(crafted: Callable[..., Path], marker: Path) -> None:
    path = crafted()
    own_code(path, marker, architectures=["OwnModel"], model_type="own")
    refused(path, "architecture 'OwnModel' is not in this version")


def test_code_for_a_known_model_is_ignored(crafted: Callable[..., Path], marker: Path) -> None:
    path = crafted()
    own_code(path, marker)
    assert type(open_source(str(path), SourceConfig()).model).__name__ == "BertModel"
    own_code(shutil.rmtree(path / "custom_generate") or path, marker, architectures=[])
    assert type(open_source(str(path), SourceConfig()).model).__module__.startswith("transformers.")


@pytest.mark.parametrize("stream", [False, True])
def test_trust_runs_the_code_and_says_so(
    crafted: Callable[..., Path], tmp_path: Path, cli: Cli, stream: bool
) -> None:
    path, marker = crafted(), tmp_path / "ran"
    own_code(path, marker, architectures=["OwnModel"], model_type="own")
    words = ["scan", path, "--trust", *(["--stream"] if stream else [])]
    done = cli(*words, HF_HOME=str(tmp_path / "cache"))
    assert done.returncode == 0, done.stderr
    assert f"--trust: transformers may run code of {path}" in done.stderr
    assert marker.exists()


def _seconds_of_children() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def test_a_crafted_directory_ends_soon_in_little_memory(crafted: Callable[..., Path]) -> None:
    path = crafted(num_hidden_layers=20_000)
    command = [sys.executable, "-P", "-m", "ampaudit", "scan", str(path)]
    started, peak = _seconds_of_children(), 0
    with subprocess.Popen(command, stderr=subprocess.PIPE, stdin=subprocess.PIPE, text=True) as process:
        found = psutil.Process(process.pid)
        while process.poll() is None:
            for member in [found, *found.children(recursive=True)]:
                try:
                    peak = max(peak, member.memory_info().rss)
                except psutil.Error:
                    continue
            time.sleep(0.02)
        assert process.stderr is not None
        assert "takes more than 5 s" in process.stderr.read()
    assert process.returncode == 2
    assert _seconds_of_children() - started < 40  # of processor time: 20 as a rule
    assert peak < 1_000_000_000


@pytest.mark.parametrize("name", ["mixtral", "t5"])
def test_an_honest_directory_gives_the_same_bits(name: str, tmp_path: Path) -> None:
    expected = ZOO[name]().model
    expected.save_pretrained(tmp_path)
    found = open_source(str(tmp_path), SourceConfig()).model
    assert type(found) is type(expected)
    for theirs, ours in (
        (expected.named_parameters, found.named_parameters),
        (expected.named_buffers, found.named_buffers),
    ):
        assert dict(theirs()).keys() == dict(ours()).keys()
        assert all(torch.equal(dict(ours())[key], tensor) for key, tensor in theirs())
