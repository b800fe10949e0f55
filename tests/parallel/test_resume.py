"""A scan that was killed goes on where it was, and gives the report that it would have given."""

from __future__ import annotations

import random
import re
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch

from ampaudit.core.files import temporary_directory
from ampaudit.parallel.identity import Identity
from ampaudit.parallel.resume import ResumedShare
from tests.support.parallel import MODEL, PROMOTING, alone, run, started, torchrun, without_times, written
from tests.support.program import Program

SCAN = ("scan", "mixed.py", "--batches", "9", "--policy", "promoting.yaml", "--fail-on", "never", "--force")
RESUMED = (*SCAN, "--resume", "kept")
SEGMENTS = ("--memory", "140kB")


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    written(tmp_path)
    (tmp_path / "promoting.yaml").write_text(PROMOTING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def usual(folder: Path) -> str:
    assert run(*SCAN, "-o", "one.json").exit_code == 0
    return without_times(folder / "one.json")


@pytest.mark.parametrize("more", [(), SEGMENTS], ids=["by batch", "by segment"])
def test_what_was_done_is_not_done_again(
    folder: Path, usual: str, more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert run(*RESUMED, *more, "-o", "first.json").exit_code == 0
    for name in ("_run_batch", "run_segmented"):
        original = getattr(__import__("ampaudit.run.audit", fromlist=[name]), name)
        monkeypatch.setattr(f"ampaudit.run.audit.{name}", watched(original))
    assert run(*RESUMED, *more, "-o", "again.json").exit_code == 0
    assert without_times(folder / "first.json") == usual
    assert without_times(folder / "again.json") == usual


DEEP = """
import torch
from torch import nn


def get_model():
    torch.manual_seed(0)
    return nn.Sequential(*[layer for _ in range(12) for layer in (nn.Linear(32, 32), nn.Tanh())])


def example_inputs():
    return (torch.randn(4, 32),)
"""


def test_a_scan_whose_boundaries_wait_on_disk_goes_on(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Their values were once cleared before they were kept for a later process."""
    (folder / "deep.py").write_text(DEEP)
    deep = ("scan", "deep.py", "--batches", "4", "--fail-on", "never", "--force")
    resumed = ("--memory", "60kB", "--resume", "kept")
    assert run(*deep, "-o", "one.json").exit_code == 0
    monkeypatch.setattr("ampaudit.run.segmented.nullcontext", lambda: temporary_directory("segments-"))
    kept, save = [], ResumedShare.save_state

    def ending(self: ResumedShare, *arguments: Any) -> None:
        save(self, *arguments)
        kept.append(arguments)
        if len(kept) == 5:
            raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ResumedShare, "save_state", ending)
        assert run(*deep, *resumed).exit_code != 0
    assert len(kept) == 5
    assert kept[0][2] > 1
    assert run(*deep, *resumed, "-o", "again.json").exit_code == 0
    assert without_times(folder / "again.json") == without_times(folder / "one.json")


SHRINKING = """
import torch
from torch import nn


def get_model():
    return nn.Sequential(*[layer for _ in range(8) for layer in (nn.Linear(32, 32), nn.Tanh())])


def batches():
    for rows in (64, 2, 2, 4):
        yield torch.randn(rows, 32) * (1e6 if rows == 4 else 1)
"""


@pytest.mark.parametrize("recorded", [1, 3])
def test_batches_that_are_left_keep_their_segments(
    folder: Path, recorded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once, the first batch that was left decided on the segments, and others were lost with its states."""
    (folder / "shrinking.py").write_text(SHRINKING)
    scan = ("scan", "shrinking.py", "--batches", "4", "--policy", "half", "--force")
    resumed = ("--memory", "175kB", "--resume", "kept")
    assert run(*scan, "-o", "one.json").exit_code == 1
    record = ResumedShare.record

    def ending(self: ResumedShare, *arguments: Any) -> None:
        if len(list(self.directory.glob("auditing-*.json"))) == recorded:
            raise KeyboardInterrupt
        record(self, *arguments)

    with monkeypatch.context() as patched:
        patched.setattr(ResumedShare, "record", ending)
        assert run(*scan, *resumed).exit_code != 0
    assert list((folder / "kept").glob("auditing-1-3-0.*.state"))
    assert run(*scan, *resumed, "-o", "again.json").exit_code == 1
    assert without_times(folder / "again.json") == without_times(folder / "one.json")


def watched(original: object) -> object:
    """Let batches only be traced."""

    def call(*args: object, **options: object) -> object:
        assert not options.get("mine"), "a batch was run again"
        return original(*args, **options)  # type: ignore[operator]

    return call


@pytest.mark.parametrize(
    ("seed", "more"),
    [(0, SEGMENTS), *((n, (SEGMENTS, ())[n % 2]) for n in range(1, 9))],
)
def test_a_scan_that_is_killed_twice_ends_with_the_same_report(
    folder: Path, ranks: list[Program], usual: str, seed: int, more: tuple[str, ...]
) -> None:
    chance = random.Random(seed)
    began = time.monotonic()
    assert alone(folder, *SCAN, *more).returncode == 0
    seconds = time.monotonic() - began
    for _ in range(2):
        (process,) = started(folder, 1, *RESUMED, *more)
        ranks.append(process)
        time.sleep((0.5 + chance.random() / 2) * seconds)
        process.kill()
        process.communicate()
    done = alone(folder, *RESUMED, *more, "-o", "again.json")
    assert done.returncode == 0, done.stderr
    assert without_times(folder / "again.json") == usual


def test_ranks_go_on_with_what_is_there(folder: Path, usual: str) -> None:
    assert torchrun(folder, 2, *RESUMED, "-o", "first.json").returncode == 0
    kept = sorted((folder / "kept").glob("*auditing-*.json"))
    for path in kept[::2]:
        path.unlink()
    assert alone(folder, *RESUMED, "-o", "again.json").returncode == 0
    assert len(kept) == len(sorted((folder / "kept").glob("*auditing-*.json")))
    assert without_times(folder / "first.json") == without_times(folder / "again.json") == usual


@pytest.fixture
def kept(folder: Path) -> Path:
    assert run(*RESUMED, *SEGMENTS).exit_code == 0
    return folder / "kept"


def refused(*words: str) -> str:
    """Return the one line that a scan is refused with."""
    done = run(*RESUMED, *words)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    return str(done.exception)


def test_a_directory_of_another_audit_is_refused(kept: Path) -> None:
    assert "kept is of another audit: it has other options" in refused("--min-headroom", "2")
    written(kept.parent, MODEL.replace("/ torch.sqrt", "* torch.sqrt"))
    assert "kept is of another audit: it has another model: other code" in refused()


def test_a_directory_of_something_else_is_refused(folder: Path) -> None:
    (folder / "kept").mkdir()
    (folder / "kept" / "thesis.tex").write_text("dear")
    assert "kept holds other files, and no audit to resume" in refused()
    assert (folder / "kept" / "thesis.tex").read_text() == "dear"


def test_a_directory_whose_description_was_not_finished_is_taken(folder: Path) -> None:
    (folder / "kept").mkdir()
    (folder / "kept" / ".audit.json.k1lled").write_text('{"kind"')
    assert run(*RESUMED).exit_code == 0
    assert (folder / "kept" / "auditing-8.json").exists()


def test_ranks_may_describe_a_new_directory_at_once(folder: Path) -> None:
    identity = Identity("1", "2", "model", "inputs", 9, "policies", "options")

    def describe(directory: Path, together: threading.Barrier) -> None:
        share = ResumedShare(directory, None)
        together.wait()
        share.describe("mixed.py", identity)

    with ThreadPoolExecutor(8) as ranks:
        for trial in range(20):
            together = threading.Barrier(8)
            told = [ranks.submit(describe, folder / str(trial), together) for _ in range(8)]
            for rank in told:
                rank.result()


def test_a_file_in_its_place_is_refused(folder: Path) -> None:
    (folder / "kept").write_text("")
    assert "kept: " in refused()


@pytest.mark.parametrize("text", ["", "{}", "not JSON", "[" * 100_000])
@pytest.mark.parametrize("name", ["audit.json", "memory.json", "auditing-3.json"])
def test_a_file_that_was_spoilt_is_named(kept: Path, name: str, text: str) -> None:
    (kept / "auditing-8.json").unlink()  # so that something is left to run
    (kept / name).write_text(text)
    assert f"kept/{name}" in refused(*SEGMENTS)


def test_a_record_with_another_digit_is_named(kept: Path) -> None:
    path = kept / "auditing-3.json"
    about, _, records = path.read_text().partition("\n")
    digit = re.search(r'"elements":(\d)', records)
    assert digit is not None
    other = str(9 - int(digit[1]))
    path.write_text(about + "\n" + records[: digit.start(1)] + other + records[digit.end(1) :])
    assert "kept/auditing-3.json is damaged" in refused(*SEGMENTS)


def test_a_state_with_a_flipped_bit_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "deep.py").write_text(DEEP)
    deep = ("scan", "deep.py", "--memory", "60kB", "--resume", "kept")

    def ending(self: ResumedShare, *arguments: Any) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(ResumedShare, "record", ending)
        assert run(*deep).exit_code != 0
    (state,) = (folder / "kept").glob("*.state")
    data = bytearray(state.read_bytes())
    values = torch.load(state, weights_only=False)["storages"]
    data[data.index(bytes(values[-1].numpy()))] ^= 1
    state.write_bytes(data)
    done = run(*deep)
    assert done.exit_code == 2
    assert f"{state.name} is damaged" in str(done.exception)
    state.unlink()
    assert run(*deep).exit_code == 0


def test_a_record_of_another_batch_is_named(kept: Path) -> None:
    (kept / "auditing-3.json").write_bytes((kept / "auditing-4.json").read_bytes())
    assert "kept/auditing-3.json is not of this audit" in refused(*SEGMENTS)


def test_a_pipeline_cannot_be_resumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    assert "--resume keeps whole batches" in str(run(*RESUMED, "--pipeline").output)


PICKY = """
import torch


class Picky(torch.nn.Module):
    def forward(self, x):
        if x.dtype == torch.float16:
            raise ValueError("float32 only")
        return x @ x * 1e3


def get_model():
    return Picky()


def example_inputs():
    return torch.ones(4, 4)
"""


def test_records_of_one_policy_are_never_those_of_another(folder: Path) -> None:
    """After a failure of one, each of the others was once given the records of the first."""
    (folder / "picky.py").write_text(PICKY)
    words = ("scan", "picky.py", "--policy", "as-is,half,torch-cuda", "--fail-on", "never")
    done = run(*words, "--resume", "kept")
    assert done.exit_code == 3
    assert "float32 only" in str(done.exception)
    assert "2 policies in float16" in run(*words).output  # without a directory, those that can be audited
