"""Tests of what stands between a file that anyone may have written and the code that uses it."""

from __future__ import annotations

import os
from pathlib import Path
from unicodedata import category

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, TypeAdapter

from ampaudit.core.errors import WeightsError
from ampaudit.core.untrusted import MAX_DEPTH, MAX_MESSAGE, describe, parse_json, read_bounded, validate
from tests.support.clock import soon


@pytest.mark.parametrize("kind", ["fifo", "directory", "missing", "device", "link"])
def test_only_regular_files_are_opened(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "x.json"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    elif kind == "device":
        path = Path("/dev/zero")
    elif kind == "link":
        path.symlink_to("/dev/zero")
    with pytest.raises(WeightsError, match=r"not a regular file|No such file"):
        read_bounded(path, 10, WeightsError)


def test_a_file_is_read_up_to_its_limit(tmp_path: Path) -> None:
    path = tmp_path / "x.json"
    path.write_bytes(b"0123456789")
    assert read_bounded(path, 10, WeightsError) == b"0123456789"
    with pytest.raises(WeightsError, match="larger than the 9 bytes"):
        read_bounded(path, 9, WeightsError)


def test_a_high_limit_takes_no_memory(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(b"0123456789")
    assert read_bounded(path, 1 << 50, WeightsError) == b"0123456789"


@pytest.mark.parametrize(
    "text",
    ['{"a": 1, "a": 2}', "[NaN]", "[1e999", "[Infinity]", "[" * 100_000, '{"a":' * 500 + "1" + "}" * 500],
)
def test_json_that_readers_disagree_about_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=r"twice|not a JSON number|line 1, column|nested"):
        parse_json(text)


@pytest.mark.parametrize("depth", [MAX_DEPTH, MAX_DEPTH + 1])
def test_the_depth_of_json_is_bounded(depth: int) -> None:
    text = "[" * depth + "]" * depth
    if depth == MAX_DEPTH:
        assert parse_json(text) is not None
    else:
        with pytest.raises(ValueError, match="nested"):
            parse_json(text)


@pytest.mark.parametrize("text", ["[" + "[]," * 2_000_001 + "1]", "[" + "0," * 3_000_001 + "0]"])
def test_json_that_would_fill_the_memory_is_refused(text: str) -> None:
    for form in (text, text.encode()):
        with pytest.raises(ValueError, match="more than 2,000,000 objects"):
            parse_json(form)


def test_a_name_that_is_repeated_last_is_found_in_one_pass() -> None:
    names = [f"n{i}" for i in range(200_000)]
    with soon(), pytest.raises(ValueError, match="'n199999' occurs twice"):
        parse_json("{" + ",".join(f'"{name}":1' for name in [*names, names[-1]]) + "}")


def test_a_path_with_a_null_character_is_refused() -> None:
    with pytest.raises(WeightsError, match="null"):
        read_bounded(Path("a\0b"), 10, WeightsError)


@given(st.text(max_size=2000))
def test_a_described_name_is_short_and_printable(name: str) -> None:
    shown = describe(name)
    assert len(shown) <= 80
    assert not any(category(char)[0] == "C" or category(char) in ("Zl", "Zp") for char in shown)


class _Row(BaseModel):
    model_config = ConfigDict(strict=True)
    size: int


@pytest.mark.parametrize("value", [{"size": "1"}, {"size": 1.0}, {}, [], {"size": {"a" * 5000: 1}}])
def test_a_value_that_does_not_fit_is_named_briefly(value: object) -> None:
    with pytest.raises(WeightsError) as raised:
        validate(TypeAdapter(dict[str, _Row]), {"\x1b[31m" * 3000: value}, Path("f.json"), WeightsError, "")
    message = raised.value.args[0]
    assert len(message) <= MAX_MESSAGE
    assert message.startswith("f.json: ")
    assert "\x1b" not in message
