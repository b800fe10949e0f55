"""Tokenizers and processors that name code, other files or absurd sizes, or that never end."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from ampaudit.core.errors import AuditError
from ampaudit.core.source_config import SourceConfig
from ampaudit.source.interface import ModelSource
from ampaudit.source.open import open_source
from tests.support.processors import VOCABULARY, tokenizer

Change = Callable[[Path], None]


@pytest.fixture(scope="module")
def honest(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from transformers import BertConfig, BertModel

    place = tmp_path_factory.mktemp("honest")
    torch.manual_seed(0)
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    BertModel(BertConfig(vocab_size=VOCABULARY, **sizes)).save_pretrained(place)
    tokenizer().save_pretrained(place)
    return place


def edited(path: Path, **values: Any) -> None:
    table = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    path.write_text(json.dumps(table | values), encoding="utf-8")


def own_code(place: Path) -> None:
    marker = str(place.parent / "ran")
    code = f"open({marker!r}, 'w').close()\nclass Own:\n    pass\n"
    (place / "own.py").write_text(code, encoding="utf-8")
    names = {"AutoTokenizer": ["own.Own", "own.Own"], "AutoProcessor": "own.Own"}
    edited(place / "tokenizer_config.json", auto_map=names, tokenizer_class="Own", processor_class="Own")


def endless(place: Path) -> None:
    template = (
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% set d = a %}"
    )
    edited(place / "tokenizer_config.json", chat_template=template + "{% endfor %}" * 3)


def escaping(place: Path) -> None:
    marker = str(place.parent / "ran")
    call = "''.__class__.__mro__[1].__subclasses__()"
    edited(place / "tokenizer_config.json", chat_template=f"{{% set x = {call} %}}{{{{ x }}}}{marker}")


def large(place: Path) -> None:
    with (place / "vocab.txt").open("wb") as stream:
        stream.truncate(1 << 40)


def elsewhere(place: Path) -> None:
    (place / "tokenizer.json").unlink()
    (place / "tokenizer.json").symlink_to("/etc/hostname")


def pipe(place: Path) -> None:
    if not hasattr(os, "mkfifo"):
        pytest.skip("no FIFOs")
    os.mkfifo(place / "vocab.txt")


def opened(honest: Path, place: Path, change: Change) -> ModelSource:
    place.mkdir()
    for file in honest.iterdir():
        (place / file.name).write_bytes(file.read_bytes())
    change(place)
    return open_source(str(place), SourceConfig())


@pytest.mark.parametrize(
    ("change", "origin", "words"),
    [
        (own_code, "sample", "built-in text"),
        (escaping, "random", "SecurityError"),
        (elsewhere, "random", "cannot load the tokenizer"),
        (large, "sample", "built-in text"),
        (pipe, "sample", "built-in text"),
    ],
)
def test_nothing_in_a_processor_runs(
    honest: Path, tmp_path: Path, change: Change, origin: str, words: str
) -> None:
    source = opened(honest, tmp_path / "model", change)
    assert source.inputs.origin == origin
    assert words in source.inputs.detail
    assert source.inputs.detail.isprintable()
    assert not (tmp_path / "ran").exists()


def test_a_template_that_never_ends_is_stopped(honest: Path, tmp_path: Path) -> None:
    started = time.perf_counter()
    with pytest.raises(AuditError, match="takes more than 30 s") as caught:
        opened(honest, tmp_path / "model", endless)
    assert caught.value.exit_code == 2
    assert time.perf_counter() - started < 130
