"""``ampaudit lint`` as people and machines call it: exit codes, formats, stdin, configuration, repairs."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml
from junitparser import JUnitXml

from ampaudit.findings.pages import all_pages
from ampaudit.linter.config import LintConfig
from ampaudit.linter.lint import lint_report
from ampaudit.linter.linting import lint_text
from ampaudit.linter.selection import RuleSelection
from ampaudit.render.json import to_json
from ampaudit.render.render import as_file
from ampaudit.report.documents import parse_document
from ampaudit.report.lint import LintReport
from tests.support.paths import ROOT
from tests.support.saved import HOSTILE

CLI = Callable[..., subprocess.CompletedProcess[str]]
BAD = all_pages()["AMP803"].bad.code
GOOD = all_pages()["AMP803"].good.code
WARNING = all_pages()["AMP861"].bad.code


@pytest.fixture
def project(tmp_path: Path) -> Path:
    (tmp_path / "src").mkdir()
    (tmp_path / "src" / "train.py").write_text(BAD)
    (tmp_path / "src" / "model.py").write_text(WARNING)
    (tmp_path / "good.py").write_text(GOOD)
    return tmp_path


def report_of(*texts: str, name: str = "train.py") -> LintReport:
    files = [lint_text(text, name, RuleSelection()) for text in texts]
    return lint_report(files, LintConfig())


def test_findings_are_printed_with_their_lines(project: Path, cli: CLI) -> None:
    done = cli("lint", "src", cwd=project)
    assert done.returncode == 1
    number = BAD.split("\n").index("        optimizer.step()") + 1
    assert f"src/train.py:{number}:9: error AMP803 the optimizer steps with scaled gradients" in done.stdout
    assert f"{number:>5} | optimizer.step()\n      | ^^^^^^^^^^^^^^^^\n" in done.stdout
    assert "= write scaler.step(optimizer)  (fixable with --fix)" in done.stdout
    assert done.stdout.endswith("FAIL  1 error, 1 warning in 2 files; 1 fixable with --fix\n")


@pytest.mark.parametrize(
    ("arguments", "code"),
    [
        (("good.py",), 0),
        (("src/model.py",), 1),  # a warning
        (("src/model.py", "--fail-on", "error"), 0),
        (("src/model.py", "--fail-on", "note"), 2),
        (("src", "--fail-on", "never"), 0),
        (("src", "--ignore", "AMP80,AMP86"), 0),
        (("src", "--select", "AMP82"), 0),
        (("--exclude", "src"), 0),
        ((), 1),
        (("nothing.py",), 2),
        (("nothing.py", "good.py"), 0),
        (("nothing.py", "good.py", "--diff"), 0),
        (("nothing.py", "--diff"), 2),
        (("src", "--per-file-ignores", "src/tr*:AMP80", "--ignore", "AMP86"), 0),
        (("src", "--per-file-ignores", "AMP80"), 2),
        (("nothing.py", "src/train.py"), 1),
        (("src", "--select", "AMP7"), 2),
        (("src", "--fix", "--diff"), 2),
        (("-", "src"), 2),
    ],
)
def test_exit_codes(project: Path, cli: CLI, arguments: tuple[str, ...], code: int) -> None:
    done = cli("lint", *arguments, cwd=project)
    assert done.returncode == code, done.stdout + done.stderr
    assert "Traceback" not in done.stderr


def test_what_cannot_be_read_is_a_line_and_the_rest_goes_on(project: Path, cli: CLI) -> None:
    (project / "src" / "old.py").write_text("print 'autocast'\n")
    (project / "src" / "locked.py").write_bytes(b"\x00\x01")
    done = cli("lint", "src", cwd=project)
    assert "src/locked.py:1: not read: a binary file\n" in done.stdout
    assert "src/old.py:1: not read: not valid Python: " in done.stdout
    assert "AMP803" in done.stdout
    assert "2 read errors" in done.stdout


def test_the_gate_fails_where_nothing_could_be_read(project: Path, cli: CLI) -> None:
    (project / "bad.py").write_text("def f(:")
    done = cli("lint", "bad.py", "--fail-on", "never", "--format", "json", cwd=project)
    assert (done.returncode, json.loads(done.stdout)["gate"]) == (2, "fail")


def test_configuration(project: Path, cli: CLI) -> None:
    config = project / "pyproject.toml"
    config.write_text(
        '[tool.ampaudit]\nfail-on = "never"\n\n[tool.ampaudit.lint]\nignore = ["AMP80"]\nfail-on = "error"\n'
    )
    assert cli("lint", "src/train.py", cwd=project).returncode == 0
    assert cli("lint", "src/model.py", cwd=project).returncode == 0
    assert cli("lint", "src/train.py", "--ignore", "AMP81", cwd=project).returncode == 1
    config.write_text('[tool.ampaudit.lint]\nexclude = ["src"]\nselect = ["AMP8"]\n')
    assert "no findings in 1 file" in cli("lint", cwd=project).stdout
    for text, said in (
        ('[tool.ampaudit.lint]\nignores = ["AMP80"]\n', "did you mean 'ignore'?"),
        ('[tool.ampaudit.lint]\nignore = "AMP80"\n', "it must be a list of strings"),
        ("[tool.ampaudit]\nlint = 3\n", "tool.ampaudit.lint is not a table"),
        ("[tool\n", "not valid TOML"),
    ):
        config.write_text(text)
        done = cli("lint", "src", cwd=project)
        assert done.returncode == 2
        assert said in done.stderr
        assert "Traceback" not in done.stderr


def test_stdin(project: Path) -> None:
    def piped(text: str, *options: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "ampaudit", "lint", "-", *options]
        return subprocess.run(command, input=text, capture_output=True, text=True, check=False, cwd=project)

    found = piped(BAD, "--stdin-filename", "my/loop.py")
    assert found.returncode == 1
    assert "my/loop.py:11:9: error AMP803" in found.stdout
    fixed = piped(BAD, "--fix")
    assert fixed.stdout == GOOD
    assert fixed.returncode == 0
    assert "+        scaler.step(optimizer)" in piped(BAD, "--diff").stdout
    assert "AMP803" in piped(f"# Loop\n\n```python\n{BAD}```\n", "--stdin-filename", "a.md").stdout


def test_fix_and_diff(project: Path, cli: CLI) -> None:
    shown = cli("lint", "src", "--diff", cwd=project)
    assert shown.returncode == 1
    assert (project / "src" / "train.py").read_text() == BAD
    assert "-        optimizer.step()\n+        scaler.step(optimizer)\n" in shown.stdout
    assert shown.stderr.splitlines()[-1] == "would fix 1 finding in 1 file"  # after progress, if it is slow
    done = cli("lint", "src", "--fix", "--fail-on", "error", cwd=project)
    assert done.returncode == 0
    assert "1 fixed" in done.stdout
    assert (project / "src" / "train.py").read_text() == GOOD
    assert cli("lint", "src", "--diff", cwd=project).returncode == 0
    only = cli("lint", "src", "--fix", "--select", "AMP82", cwd=project)
    assert only.returncode == 0


def test_a_diff_can_be_applied(project: Path, cli: CLI) -> None:
    shown = cli("lint", "src", "--diff", cwd=project)
    subprocess.run(
        ["patch", "-p0"], input=shown.stdout, text=True, cwd=project, check=True, capture_output=True
    )
    assert (project / "src" / "train.py").read_text() == GOOD


def test_a_file_that_cannot_be_written_is_said(project: Path, cli: CLI) -> None:
    target = project / "src" / "train.py"
    done = cli("lint", "src", "--format", "json", "-o", "src", cwd=project)
    assert done.returncode == 2
    assert "is a directory" in done.stderr
    assert target.read_text() == BAD


def test_torch_is_never_imported(project: Path) -> None:
    code = (
        "import sys\nfrom ampaudit.cli.program import main\n"
        "main(['lint', 'src', '--fix', '-q'], standalone_mode=False)\n"
        "assert not any(name.split('.')[0] in ('torch', 'numpy') for name in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=project, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


# formats


def test_json_is_a_report_that_can_be_read_again(project: Path, cli: CLI) -> None:
    done = cli("lint", "src", "--format", "json", cwd=project)
    found = parse_document(done.stdout, "stdout")
    assert isinstance(found, LintReport)
    assert [f.code for f in found.findings] == ["AMP861", "AMP803"]
    assert to_json(found) == done.stdout
    (project / "lint.json").write_text(done.stdout)
    again = cli("report", "lint.json", cwd=project)
    assert again.returncode == 0
    assert "error AMP803" in again.stdout
    page = cli("report", "lint.json", "--format", "html", cwd=project)
    assert page.returncode == 0
    assert "<!DOCTYPE html>" in page.stdout.replace("<!doctype", "<!DOCTYPE")
    assert "AMP803" in page.stdout


def test_sarif_is_valid_and_marks_the_columns(project: Path, cli: CLI) -> None:
    done = cli("lint", "src", "--format", "sarif", cwd=project)
    log: dict[str, Any] = json.loads(done.stdout)
    schema = json.loads((ROOT / "tests" / "data" / "sarif-2.1.0.json").read_text())
    jsonschema.validators.validator_for(schema)(schema).validate(log)
    (run,) = log["runs"]
    error = next(result for result in run["results"] if result["ruleId"] == "AMP803")
    place = error["locations"][0]["physicalLocation"]
    assert place["artifactLocation"]["uri"] == "src/train.py"
    region = place["region"]
    line = BAD.split("\n")[region["startLine"] - 1]
    assert line[region["startColumn"] - 1 : region["endColumn"] - 1] == "optimizer.step()"
    assert run["tool"]["driver"]["rules"][0]["help"]["markdown"].startswith("# AMP803")


def test_a_fingerprint_follows_the_line_and_not_its_number() -> None:
    def prints(text: str) -> list[str]:
        log = json.loads(as_file(report_of(text), "sarif"))
        return [result["partialFingerprints"]["ampauditSite/v1"] for result in log["runs"][0]["results"]]

    assert prints(BAD) == prints("# moved\n\n" + BAD)
    assert prints(BAD) != prints(BAD.replace("def train", "def other"))


def test_github_and_junit_and_markdown(project: Path, cli: CLI) -> None:
    github = cli("lint", "src", "--format", "github", cwd=project).stdout
    assert (
        "::error file=src/train.py,line=11,title=AMP803 optimizer step bypasses the scaler,col=9::" in github
    )
    junit = JUnitXml.fromstring(as_file(report_of(BAD), "junit").encode())
    assert junit.failures == 1
    assert "AMP803" in as_file(report_of(BAD), "markdown")


@pytest.mark.parametrize("form", ["text", "json", "sarif", "github", "junit", "markdown"])
def test_hostile_names_are_shown_and_not_obeyed(form: str, tmp_path: Path, cli: CLI) -> None:
    name = "a\x1b[31m\u202e<script>.py"
    (tmp_path / name).write_text(BAD.replace("def train", "def train\u0430"))
    done = cli("lint", ".", "--format", form, cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert "\x1b" not in done.stdout
    if form != "json":
        assert "\u202e" not in done.stdout
    assert HOSTILE


def test_the_pre_commit_hook_runs(tmp_path: Path) -> None:
    (hook,) = [
        h for h in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text()) if h["id"] == "ampaudit-lint"
    ]
    entry = hook["entry"].replace("ampaudit", f"{sys.executable} -m ampaudit", 1)
    hooks = [{**hook, "entry": entry}]
    (tmp_path / ".pre-commit-config.yaml").write_text(
        yaml.safe_dump({"repos": [{"repo": "local", "hooks": hooks}]})
    )
    (tmp_path / "train.py").write_text(BAD)
    for command in (["init", "-q"], ["add", "."]):
        subprocess.run(["git", *command], cwd=tmp_path, check=True)
    run = [sys.executable, "-m", "pre_commit", "run", "--all-files", "--verbose"]
    done = subprocess.run(run, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=300)
    assert done.returncode == 1
    assert "train.py:11:9: error AMP803" in done.stdout
    (tmp_path / "train.py").write_text(GOOD)
    subprocess.run(["git", "add", "."], cwd=tmp_path, check=True)
    assert subprocess.run(run, cwd=tmp_path, capture_output=True, check=False, timeout=300).returncode == 0


def test_explain_says_how_to_see_it(cli: CLI) -> None:
    assert "run: ampaudit lint model.py" in cli("explain", "AMP807").stdout


def test_the_documentation_shows_what_is_printed(cli: CLI) -> None:
    text = (ROOT / "docs" / "linting.md").read_text(encoding="utf-8")
    shown = text.split("$ ampaudit lint examples/lint/finetune.py\n")[1].split("```")[0]
    assert cli("lint", "examples/lint/finetune.py", cwd=ROOT).stdout == shown


def test_the_documentation_lists_the_repairs_and_the_codes() -> None:
    from tests.linter.examples import FIXABLE, PAGES

    text = (ROOT / "docs" / "linting.md").read_text(encoding="utf-8")
    listed = text.split("Fixes exist for AMP")[1].split(".")[0].replace(" and", ",")
    assert {f"AMP{number.strip()}" for number in listed.split(",") if number.strip()} == FIXABLE
    table = text.split("| codes | about |")[1].split("\n\n")[0]
    spans = [(int(a), int(b or a)) for a, b in re.findall(r"AMP(\d+)(?: to AMP(\d+))?", table)]
    numbers = {int(code[3:]) for code in PAGES}
    missing = sorted(n for n in numbers if not any(a <= n <= b for a, b in spans))
    assert not missing, f"add these to the table in docs/linting.md: {missing}"
    assert {end for span in spans for end in span} <= numbers
