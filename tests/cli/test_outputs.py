"""Every command with every format and suffix: written, or refused before any work; and no result is lost."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import click
import pytest
import torch
from click.testing import CliRunner, Result

import ampaudit
from ampaudit.cli.program import COMMANDS, main
from ampaudit.core.errors import AuditError, OutputError, UsageError
from ampaudit.render.render import FORMAT_REGISTRY, as_file, formats_of
from ampaudit.report.documents import Document, parse_document
from ampaudit.report.model import Report
from ampaudit.report.tuning import TuningReport
from tests.support.saved import sample, text_of

STRANGE = (".pdf", ".docx", ".yaml", ".YML", ".png", ".pt", ".gz")


@dataclass(frozen=True, slots=True)
class Case:
    """A command line whose work is replaced by a saved result.

    Attributes:
        words: the command line.
        kind: of the document that the command makes.
        work: module and name of the function that does the work.
        loads: the same of the one that imports the model.
        policy: suffixes of ``-o`` with which it writes a rule file.
    """

    words: str
    kind: str
    work: str
    loads: str = ""
    policy: tuple[str, ...] = ()


CASES = {
    "scan": Case(
        "scan model.py", "scan", "ampaudit.audit.scan.scan_policies", "cli.scan_command.load_source"
    ),
    "plan": Case("plan model.py", "plan", "ampaudit.audit.plan.plan", "cli.plan_command.load_source"),
    "train": Case("train model.py", "training", "ampaudit.training.train.train", "source.open.open_source"),
    "bench": Case("bench model.py", "bench", "ampaudit.benchmarking.run.bench", "source.open.open_source"),
    "tune": Case(
        "tune model.py", "tuning", "ampaudit.tuning.tune.tune", "cli.loading.load_source", (".yaml", ".yml")
    ),
    "check": Case("check model.py", "check", "ampaudit.ci.check.check"),
    "verify": Case("verify out", "verification", "ampaudit.export.verify.verify"),
    "lint": Case("lint model.py", "lint", "ampaudit.linter.lint.lint_report"),
    "diff": Case("diff old.json new.json", "diff", "ampaudit.cli.report_command.differences"),
    "report": Case("report old.json", "scan", "ampaudit.report.documents.read_document"),
}
WITHOUT_A_DOCUMENT = {"init", "rules", "devices", "explain", "convert", "record", "merge"}


class Stage:
    """A directory with the inputs of all commands, whose work is to return a saved document."""

    def __init__(self, case: Case, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.case, self.place, self.worked, self.loaded = case, place, 0, 0
        self.document = sample(case.kind)
        self.meanwhile: Callable[[], object] = lambda: None
        for name in ("old.json", "new.json"):
            (place / name).write_text(text_of("overflow"))
        (place / "model.py").write_text("import torch\n")
        monkeypatch.chdir(place)
        monkeypatch.setattr(case.work, self._work)
        if case.loads:
            monkeypatch.setattr(f"ampaudit.{case.loads}", self._load)

    def run(self, *words: str) -> Result:
        self.worked = self.loaded = 0
        return CliRunner(env={"COLUMNS": "160"}).invoke(main, [*self.case.words.split(), *words])

    def _load(self, *_: object, **__: object) -> SimpleNamespace:
        self.loaded += 1
        return SimpleNamespace(kind="python", dtype=None, reference=None)

    def _work(self, *_: object, **__: object) -> Document | list[Document]:
        self.worked += 1
        self.meanwhile()
        return [self.document] if self.case.words.startswith("scan") else self.document


@pytest.fixture
def stage(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Stage:
    (tmp_path / "place").mkdir()
    return Stage(CASES[request.param], tmp_path / "place", monkeypatch)


every_command = pytest.mark.parametrize("stage", CASES, indirect=True)


def listed(command: str) -> tuple[str, ...]:
    """The formats that a command's ``--help`` lists."""
    found = main.get_command(click.Context(main), command)
    assert found is not None
    (option,) = (parameter for parameter in found.params if parameter.name == "form")
    assert isinstance(option.type, click.Choice)
    return tuple(option.type.choices)


def refused_early(result: Result, stage: Stage) -> bool:
    usage = result.exit_code == 2 or isinstance(result.exception, UsageError | OutputError)
    return usage and stage.worked == 0 and not result.stdout


def test_every_command_is_here() -> None:
    assert CASES.keys() | WITHOUT_A_DOCUMENT == COMMANDS.keys()


@pytest.mark.parametrize("command", [*CASES, "convert"])
def test_help_lists_the_formats_of_the_document(command: str) -> None:
    kind = CASES[command].kind if command in CASES else "conversion"
    assert listed(command) == formats_of(kind)
    shown = CliRunner(env={"COLUMNS": "200"}).invoke(main, [command, "--help"]).stdout
    for form in listed(command):
        suffixes = FORMAT_REGISTRY[form].suffixes
        assert form in shown
        assert not suffixes or suffixes[0] in shown or command == "convert"


@every_command
def test_every_format_is_printed_or_refused_before_the_work(stage: Stage) -> None:
    offered = listed(stage.case.words.split()[0])
    for form in FORMAT_REGISTRY:
        result = stage.run("--format", form)
        if form not in offered:
            assert refused_early(result, stage), (form, result.output)
            continue
        assert result.exception is None or isinstance(result.exception, SystemExit), form
        assert stage.worked == 1
        assert form == "text" or result.stdout == as_file(stage.document, form), form
        assert result.stdout.strip()


@every_command
def test_every_suffix_gets_its_format_or_is_refused_before_the_work(stage: Stage) -> None:
    offered = listed(stage.case.words.split()[0])
    forms = {suffix: name for name, form in FORMAT_REGISTRY.items() for suffix in form.suffixes}
    for suffix in (*forms, *map(str.upper, forms), *STRANGE):
        path, form = stage.place / f"result{suffix}", forms.get(suffix.lower())
        result = stage.run("-o", path.name)
        if suffix.lower() in stage.case.policy:
            assert isinstance(stage.document, TuningReport)
            assert path.read_text(encoding="utf-8") == stage.document.policy
            assert "policy written to" in result.stderr
            continue
        if form not in offered:
            assert refused_early(result, stage), (suffix, result.output)
            assert f"result{suffix}" in str(result.exception)
            assert "end the name in .txt, .json, .html" in str(result.exception)
            assert not path.exists()
            continue
        assert result.exception is None or isinstance(result.exception, SystemExit), suffix
        assert f"written to {path.name}" in result.stderr
        written = path.read_text(encoding="utf-8")
        assert written == as_file(stage.document, form) if form != "text" else written.strip()
        path.unlink()
    named = stage.run("-o", "result.pdf", "--format", "text")
    assert "written to result.pdf" in named.stderr


@every_command
def test_an_output_that_cannot_be_written_is_refused_before_the_work(stage: Stage) -> None:
    (stage.place / "there.json").write_text("{}")
    (stage.place / "directory.json").mkdir()
    (stage.place / "loop.json").symlink_to("loop.json")
    impossible = ["there.json", "directory.json", "missing/x.json", "there.json/x.json", "loop.json"]
    impossible += [f"{'x' * 252}.json"]
    impossible += ["/proc/x.json"] * sys.platform.startswith("linux")  # refuses root as well
    for path in impossible:
        result = stage.run("-o", path)
        failure = result.exception
        assert stage.worked == 0, path
        assert isinstance(failure, OutputError | OSError), (path, result.output)
        assert sorted(p.name for p in stage.place.iterdir()) == sorted(
            ["old.json", "new.json", "model.py", "there.json", "directory.json", "loop.json"]
        )
    assert "written to there.json" in stage.run("-o", "there.json", "--force").stderr


EVERYWHERE = ("--dtype int8", "--device cuda")
MISTAKES = {
    "scan": (
        *EVERYWHERE,
        *("--contract wrong", "--ignore AMQ1", "--assume wrong", "--assume input=3", "--policy wrong"),
        *("--ranges --static", "--ranges --prove", "--ranges --advise", "--ranges --stress 3"),
        *("--static --diff", "--static --stress 3", "--backward --contract saturate", "--loss-scale 8"),
        *("--advise-policy old.json", "--advise-policy x.json -o ../place/x.json"),
        "--advise-policy x.json -o ../place/x.json --force",
    ),
    "plan": (*EVERYWHERE, "--policy wrong"),
    "train": (
        *EVERYWHERE,
        "--loss-scale wrong",
        "--policy half,half",
        "--plot x.gif",
        "--tensorboard old.json",
    ),
    "bench": (
        *EVERYWHERE,
        "--modes wrong",
        "--plot x.gif",
        "--for wrong",
        "--plot x.svg -o x.svg --format json",
    ),
    "tune": (
        *EVERYWHERE,
        *("--dtype float32", "--min-sqnr many", "--min-sqnr 50 --metric-drop 0.1", "--metric-drop -1"),
        *("--cost money", "--for wrong --cost time", "--for v100", "--plot x.gif"),
        *(
            "--policy-file old.json",
            "-o x.yaml --policy-file y.yaml",
            "--plot x.svg -o x.svg --format json",
        ),
    ),
    "check": ("--dtype int8", "--ignore AMQ1"),
    "lint": ("--diff --format json", "--fix --diff"),
}


@pytest.mark.parametrize(
    ("stage", "words"),
    [(command, words) for command, lines in MISTAKES.items() for words in lines],
    indirect=["stage"],
)
def test_a_mistake_is_told_before_the_model_is_loaded(
    stage: Stage, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = stage.run(*words.split())
    assert result.exit_code == 2 or isinstance(result.exception, AuditError), result.output
    assert (stage.loaded, stage.worked) == (0, 0)
    right = stage.run()
    assert (stage.loaded, stage.worked) == (bool(stage.case.loads), 1), right.output


@every_command
def test_a_second_output_is_refused_before_the_work(stage: Stage) -> None:
    result = stage.run("-o", "first.json", "-o", "second.txt")
    assert result.exit_code == 2
    assert "'--output': takes one path, not 2: first.json, second.txt" in result.output
    assert (stage.loaded, stage.worked) == (0, 0)
    assert not list(Path.cwd().glob("*.txt"))


@pytest.mark.parametrize(
    ("words", "flag"), [("out --to float32 --onnx", "--onnx"), ("w.safetensors --min-sqnr 9", "--min-sqnr")]
)
def test_an_option_without_effect_on_a_conversion_is_refused(words: str, flag: str) -> None:
    failure = CliRunner().invoke(main, ["convert", "-o", "made", *words.split()]).exception
    assert isinstance(failure, UsageError)
    assert failure.hint == f"leave out {flag}"


def kept_in(failure: BaseException | None) -> Path:
    """The file that an error says to have kept the result in."""
    (note,) = getattr(failure, "__notes__", ())
    found = re.fullmatch(r"the result is kept in (\S+): ampaudit report \1 shows it", note)
    assert found is not None, note
    return Path(found[1])


@every_command
def test_a_directory_removed_meanwhile_loses_nothing(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (stage.place / "gone").mkdir()
    stage.meanwhile = lambda: shutil.rmtree("gone")
    result = stage.run("-o", "gone/result.html")
    assert isinstance(result.exception, OutputError)
    kept = kept_in(result.exception)
    assert kept.parent == tmp_path
    assert parse_document(kept.read_text(encoding="utf-8"), "kept") == stage.document


@pytest.mark.parametrize("stage", ["scan"], indirect=True)
def test_a_command_that_fails_again_keeps_its_result_once(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def kept(**changes: object) -> Path:
        assert isinstance(stage.document, Report)
        stage.document = replace(stage.document, **changes)  # type: ignore[arg-type]
        (stage.place / "gone").mkdir()
        return kept_in(stage.run("-o", "gone/result.html").exception)

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    stage.meanwhile = lambda: shutil.rmtree("gone")
    first, again = kept(timings={"run": 1.0}), kept(timings={"run": 2.0})
    assert again == first
    assert parse_document(again.read_text(encoding="utf-8"), "kept") == stage.document
    other = kept(notes=("another",))
    assert sorted(tmp_path.glob("ampaudit-*")) == sorted({first, other})
    assert len({first, other}) == 2


@pytest.mark.parametrize("stage", ["scan"], indirect=True)
def test_a_policy_that_cannot_be_written_keeps_the_report(
    stage: Stage, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (stage.place / "gone").mkdir()
    stage.meanwhile = lambda: shutil.rmtree("gone")
    result = stage.run("--advise-policy", "gone/policy.yaml")
    assert isinstance(result.exception, OutputError)
    kept = kept_in(result.exception)
    assert parse_document(kept.read_text(encoding="utf-8"), "kept") == stage.document


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of a process")
@every_command
def test_where_no_file_can_be_written_the_result_is_printed(stage: Stage) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    stage.meanwhile = lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    try:
        result = stage.run("-o", "result.html")
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert isinstance(result.exception, OutputError)
    assert "File too large" in str(result.exception)
    assert result.exception.__notes__ == [
        "the result is printed as JSON, since no temporary file can be written"
    ]
    assert parse_document(result.stdout, "printed") == stage.document


@every_command
def test_a_page_that_cannot_be_drawn_loses_nothing(
    stage: Stage, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(_: object) -> str:
        raise ZeroDivisionError

    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("ampaudit.render.html.page.to_html", broken)
    result = stage.run("-o", "result.html")
    assert isinstance(result.exception, ZeroDivisionError)
    assert parse_document(kept_in(result.exception).read_text(encoding="utf-8"), "kept") == stage.document


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is full")
def test_a_full_standard_output_loses_nothing(tmp_path: Path) -> None:
    (tmp_path / "saved.json").write_text(text_of("plan"))
    command = f"{sys.executable} -m ampaudit report saved.json --format csv > /dev/full"
    done = subprocess.run(
        ["sh", "-c", command],
        cwd=tmp_path,
        env={**os.environ, "TMPDIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert "cannot write to standard output: No space left on device" in done.stderr
    (kept,) = tmp_path.glob("ampaudit-plan-*.json")
    assert f"the result is kept in {kept}" in done.stderr
    assert json.loads(kept.read_text()) == json.loads(text_of("plan"))


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="has no device that is full")
def test_a_full_standard_error_does_not_matter(tmp_path: Path) -> None:
    (tmp_path / "saved.json").write_text(text_of("plan"))
    command = f"{sys.executable} -m ampaudit report saved.json -o made.csv 2> /dev/full"
    done = subprocess.run(
        ["sh", "-c", command], cwd=tmp_path, env={**os.environ, "TMPDIR": str(tmp_path)}, check=False
    )
    assert done.returncode == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["made.csv", "saved.json"]


def test_a_dash_is_standard_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "saved.json").write_text(text_of("plan"))
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(main, ["report", "saved.json", "-o", "-", "--format", "CSV"])
    assert result.stdout == as_file(sample("plan"), "csv")
    assert [path.name for path in tmp_path.iterdir()] == ["saved.json"]


@pytest.mark.skipif(sys.platform == "win32", reason="has no limits of a process")
@pytest.mark.parametrize("failure", ["removed", "full"])
def test_a_conversion_that_cannot_be_written_keeps_its_audit(
    failure: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import resource

    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    (tmp_path / "place").mkdir()

    def meanwhile(phase: str, done: int, total: int) -> None:
        if failure == "removed" and phase == "auditing" and done == total:
            shutil.rmtree(tmp_path / "place")
        if failure == "full" and phase == "exporting the program":
            resource.setrlimit(resource.RLIMIT_FSIZE, (7_000, limits[1]))

    model, inputs, out = torch.nn.Linear(8, 8).eval(), torch.ones(2, 8), tmp_path / "place" / "out"
    expected = ampaudit.scan(model, inputs, policy="half")
    try:
        with pytest.raises(OutputError) as caught:
            ampaudit.convert(
                model, inputs, out, policy="half", session=ampaudit.Session(on_progress=meanwhile)
            )
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    reason = {"removed": "no such directory: ", "full": f"cannot write {out}: File too large"}[failure]
    assert str(caught.value).startswith(reason)
    assert not out.exists()
    kept = parse_document(kept_in(caught.value).read_text(encoding="utf-8"), "kept")
    assert isinstance(kept, Report)
    assert kept.sites == expected.sites
