"""``scan --part`` and ``merge``: the report of all parts is that of one scan, byte for byte but for times."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import nn

from ampaudit.audit.config import ScanConfig
from ampaudit.audit.inputs import as_source
from ampaudit.parallel.identity import identity_of, imported_files
from ampaudit.policy import load_policy
from tests.support.parallel import BATCHES, MODEL, PROMOTING, run, scanned, without_times, written


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    written(tmp_path)
    (tmp_path / "promoting.yaml").write_text(PROMOTING)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("options", "counts"),
    [
        (("--policy", "torch-cuda"), (1, 2, 3, 7)),
        (("--policy", "half", "--backward"), (3,)),
        (("--ranges",), (2, 5)),
        (("--policy", "half", "--sensitivity"), (3,)),
        (("--policy", "half", "--backward", "--sensitivity"), (2,)),
        (("--policy", "promoting.yaml"), (5,)),
        (("--policy", "half,torch-cuda", "--dtype", "bfloat16"), (2,)),
        (("--policy", "half", "--prove", "--assume", "input=-100:300"), (4,)),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) and isinstance(value[0], str) else "",
)
def test_any_number_of_parts_gives_the_report_of_one(
    folder: Path, options: tuple[str, ...], counts: tuple[int, ...]
) -> None:
    one = without_times(scanned(folder, *options))
    for count in counts:
        assert without_times(scanned(folder, *options, parts=count)) == one, count


def test_a_measured_rule_decides_on_all_parts(folder: Path) -> None:
    """The batch that needs float32 belongs to one part; the merge runs the second pass."""
    report = json.loads(scanned(folder, "--policy", "promoting.yaml", parts=4).read_text())
    promoted = [site["site"] for site in report["sites"] if site["rule"] == "promoting/large"]
    assert promoted
    assert report["run"]["batches"] == BATCHES


def test_the_first_batch_that_fails_is_the_error_of_all(folder: Path) -> None:
    body = MODEL.replace("yield {", "ids = ids + (1000 if number in (4, 6) else 0)\n        yield {")
    written(folder, body)
    one = run("scan", "mixed.py", "--batches", 9)
    assert one.exit_code == 2
    for number in (1, 2, 3):
        done = run("scan", "mixed.py", "--batches", 9, "--part", f"{number}/3", "-o", f"{number}.json")
        assert done.exit_code == (0 if number == 3 else 2)
    merged = run("merge", "1.json", "2.json", "3.json")
    assert merged.exit_code == one.exit_code
    assert str(merged.exception) == str(one.exception)


def parts(folder: Path, count: int, *options: str) -> list[str]:
    files = [f"{number}.json" for number in range(1, count + 1)]
    for number, file in enumerate(files, 1):
        words = ("scan", "mixed.py", "--batches", 4, "--part", f"{number}/{count}", "-o", file, "--force")
        assert run(*words, *options).exit_code == 0
    return files


def test_missing_doubled_and_foreign_parts_are_named(folder: Path) -> None:
    files = parts(folder, 3)
    assert "missing: part 2/3" in str(run("merge", files[0], files[2]).exception)
    assert "the same part twice: 1.json, 1.json" in str(run("merge", files[0], *files).exception)
    run("scan", "mixed.py", "--batches", 4, "--part", "3/3", "-o", "other.json", "--policy", "half")
    foreign = run("merge", *files[:2], "other.json")
    assert "other.json is of another audit than 1.json: it has another policy" in str(foreign.exception)
    assert foreign.exit_code == 2


def test_the_merge_decides_what_fails(folder: Path) -> None:
    files = parts(folder, 2, "--policy", "half", "--fail-on", "never")
    assert run("merge", *files).exit_code == 0
    assert run("merge", *files, "--fail-on", "error").exit_code == 1
    refused = run("scan", "mixed.py", "--part", "1/2", "-o", "part.html")
    assert refused.exit_code == 2
    assert not Path("part.html").exists()


def test_a_model_that_has_changed_since_is_refused(folder: Path) -> None:
    files = parts(folder, 2)
    written(folder, MODEL.replace("Linear(32, 5)", "Linear(32, 6)"))
    assert "another model: other code, other files that it imports" in str(run("merge", *files).exception)


def test_files_beside_the_model_count_when_they_are_python(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("beside.py", "beside.so", "sub/beside.py"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(name)
        module = ModuleType(name)
        module.__file__ = str(tmp_path / name)
        monkeypatch.setitem(sys.modules, f"test_{name}", module)
    source = replace(
        as_source(nn.Linear(1, 1), batches=[torch.ones(1)]), location=f"{tmp_path}/model.py:M", kind="python"
    )
    found = [line.partition(" ")[0] for line in imported_files(source)]
    assert found == ["beside.py", "beside.py"]


def test_a_file_that_the_model_imports_belongs_to_it(folder: Path) -> None:
    """Parts of a model whose helper had changed in between were once joined."""
    helper = Path("scale_of_parts.py")
    helper.write_text("SCALE = 1.0\n")
    written(folder, "from scale_of_parts import SCALE\n" + MODEL)
    files = parts(folder, 2)
    assert run("merge", *files).exit_code != 2
    helper.write_text("SCALE = 2.0\n")
    assert "another model: other code, other files that it imports" in str(run("merge", *files).exception)


def test_plain_inputs_and_the_mode_belong_to_the_audit(folder: Path) -> None:
    """Parts with other ones were once joined, and a resumed run took what another one had measured."""
    written(folder, MODEL)
    Path("inputs.py").write_text(INPUTS.format(1))
    Path("other.py").write_text(INPUTS.format(2))
    Path("plain.py").write_text(PLAIN)
    first = run("scan", "plain.py", "--inputs", "inputs.py", "--batches", 2, "--part", "1/2", "-o", "1.json")
    assert first.exit_code == 0
    for options, words in ((["other.py"], "other inputs"), (["inputs.py", "--train"], "another mode")):
        other = ("--batches", 2, "--part", "2/2", "-o", "2.json", "--force")
        run("scan", "plain.py", "--inputs", *options, *other)
        assert words in str(run("merge", "1.json", "2.json").exception)


LOSS = """
from pathlib import Path

import torch


def batches():
    for _ in range(2):
        yield {"x": torch.ones(2, 4), "label": torch.full((2,), float(Path("label").read_text()))}


def model_inputs(batch):
    return batch["x"], 1


def loss(output, batch):
    return (output.sum(-1) - batch["label"]).pow(2).sum() * 1e2
"""


@pytest.mark.parametrize(
    ("file", "text", "words"),
    [("loss.py", LOSS.replace("1e2", "1e9"), "another loss"), ("label", "2", "other inputs")],
)
def test_the_loss_and_its_labels_belong_to_the_audit(folder: Path, file: str, text: str, words: str) -> None:
    """A resumed run once took the gradients of another loss, and passed where it overflows."""
    Path("plain.py").write_text(PLAIN)
    Path("loss.py").write_text(LOSS)
    Path("label").write_text("1")
    scan = ("scan", "plain.py", "--inputs", "loss.py", "--batches", 2, "--backward", "--fail-on", "never")
    assert run(*scan, "--part", "1/2", "-o", "1.json").exit_code == 0
    assert run(*scan, "--resume", "kept").exit_code == 0
    Path(file).write_text(text)
    assert run(*scan, "--part", "2/2", "-o", "2.json").exit_code == 0
    assert words in str(run("merge", "1.json", "2.json").exception)
    assert words in str(run(*scan, "--resume", "kept").exception)


@pytest.mark.usefixtures("folder")
def test_a_file_of_twins_belongs_to_the_audit() -> None:
    source = as_source(nn.Linear(1, 1), batches=[torch.ones(1)])
    Path("twins.py").write_text("SCALE = 1\n")
    first = identity_of(source, [load_policy("half")], ScanConfig(twins=Path("twins.py")))
    Path("twins.py").write_text("SCALE = 2\n")
    second = identity_of(source, [load_policy("half")], ScanConfig(twins=Path("twins.py")))
    assert "other twins" in first.difference(second)


INPUTS = """
import torch


def batches():
    for _ in range(2):
        yield torch.ones(2, 4), {}
"""
PLAIN = """
import torch
from torch import nn


class Scaled(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x, factor):
        return self.linear(x) * factor


def get_model():
    torch.manual_seed(0)
    return Scaled()
"""


def test_a_part_of_an_older_version_is_named(folder: Path) -> None:
    files = parts(folder, 2)
    about, *records = Path(files[1]).read_text().splitlines()
    part = json.loads(about)
    part["identity"]["version"] = "0.0.9"
    Path(files[1]).write_text("\n".join([json.dumps(part), *records]))
    assert "2.json is of another audit than 1.json: it has ampaudit 0.0.9" in str(
        run("merge", *files).exception
    )


OBSERVED = "up/linear"
ABOUT: dict[str, dict[str, Any]] = {
    "newer": {"schema": 99},
    "a batch that is text": {"batches": [0, 1, 2, "three"]},
    "a batch that is another's": {"batches": [0, 1, 2, 4]},
    "a batch less": {"batches": [0, 1, 2]},
    "an option to write": {"words": ["-o", "stolen.json"]},
    "an option to trust": {"words": ["--trust"]},
    "no option": {"words": ["--no-such-option"]},
    "a model elsewhere": {"location": "/etc/passwd"},
    "a module": {"location": "antigravity:main"},
}
SEEN: dict[str, dict[str, Any]] = {
    "a number that is text": {"elements": "many"},
    "bins that are text": {"samples": {"exponents": "many"}},
    "a bin that is text": {"samples": {"exponents": [-3, 1, "many"]}},
    "a bin that is a fraction": {"samples": {"exponents": [-3, 1, 1.5]}},
}
LINES = [
    "cut off",
    "a line less",
    "a line more",
    "not a part",
    "a name twice",
    "a number too long",
    "no JSON",
]


def broken(text: str, how: str) -> str:
    about, *records = text.splitlines()
    if how in ABOUT:
        return "\n".join([json.dumps(json.loads(about) | ABOUT[how]), *records])
    if how in SEEN:
        (record,) = json.loads(records[1])
        record["observations"][OBSERVED] |= SEEN[how]
        return "\n".join([about, records[0], json.dumps([record]), *records[2:]])
    if how == "no record":
        lines = "".join(f"{line}\n" for line in [records[0], "[]", *records[2:]])
        digest = {"digest": sha256(lines.encode()).hexdigest()}
        return json.dumps(json.loads(about) | digest) + "\n" + lines
    return {
        "cut off": text[:-40],
        "a line less": "\n".join([about, *records[:-1]]),
        "a line more": text + records[0],
        "not a part": json.dumps({"kind": "report"}),
        "a name twice": text.replace('"elements":', '"elements":1,"elements":', 1),
        "a number too long": text.replace('"elements":', '"elements":' + "1" * 30, 1),
        "no JSON": f"{about}\n" + "[" * 100_000,
    }[how]


@pytest.mark.parametrize("old", ['"elements":', '"peak":', '"samples":', '"err_sq":'])
def test_a_part_with_a_flipped_bit_is_damaged(folder: Path, old: str) -> None:
    """A field with another name was once left out, and another digit taken for what was measured."""
    files = parts(folder, 2)
    data = bytearray(Path(files[1]).read_bytes())
    about = data.index(b"\n")
    data[data.index(old.encode(), about) + len(old) - 3] ^= 1
    Path(files[1]).write_bytes(data)
    done = run("merge", *files)
    assert done.exit_code == 2, done.output
    assert "2.json is damaged: its records are not those that were written" in str(done.exception)


@pytest.mark.parametrize("how", [*ABOUT, *SEEN, *LINES, "no record"])
def test_a_hostile_part_is_one_line(folder: Path, how: str) -> None:
    (file,) = parts(folder, 1)
    Path(file).write_text(broken(Path(file).read_text(), how))
    done = run("merge", file)
    assert done.exit_code == 2, done.output
    assert "Traceback" not in done.output
    assert "next: " in str(done.exception)
    assert not (folder / "stolen.json").exists()


def test_a_part_with_a_line_without_end_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (file,) = parts(folder, 1)
    longest = max(map(len, Path(file).read_bytes().splitlines()))
    monkeypatch.setattr("ampaudit.parallel.parts.MAX_LINE", longest)
    assert "a line of more than" in str(run("merge", file).exception)
    monkeypatch.setattr("ampaudit.parallel.parts.MAX_LINE", longest + 1)
    assert run("merge", file).exit_code == 1


def test_ranks_of_torchrun_write_no_parts(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("RANK", "0"),
        ("WORLD_SIZE", "2"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("MASTER_PORT", "1"),
    ):
        monkeypatch.setenv(name, value)
    done = run("scan", "mixed.py", "--part", "1/2", "-o", "part.json")
    assert "not for torchrun" in done.output + str(done.exception)
    assert not (folder / "part.json").exists()


@pytest.mark.parametrize("text", ["0/3", "4/3", "3", "a/b", "1/0", "-1/2", ""])
def test_a_part_that_is_none_is_refused(folder: Path, text: str) -> None:
    done = run("scan", "mixed.py", "--part", text, "-o", "part.json")
    assert done.exit_code == 2
    assert not (folder / "part.json").exists()
