"""Everything that a user reads, compared letter by letter; ``pytest --refresh-golden`` rewrites it.

Reports are saved ones, so that no number depends on the machine.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace

import click
import pytest
from click.testing import CliRunner

from ampaudit.cli.output import as_text
from ampaudit.cli.program import COMMANDS, main
from ampaudit.findings.pages import all_pages
from ampaudit.linter.config import LintConfig
from ampaudit.linter.lint import lint_report
from ampaudit.linter.linting import lint_text
from ampaudit.linter.selection import RuleSelection
from ampaudit.render.html.page import to_html
from ampaudit.render.json import to_json
from ampaudit.render.render import FORMAT_REGISTRY, as_file, for_terminal
from ampaudit.report.compare import diff
from ampaudit.report.documents import Document
from ampaudit.report.lint import LintReport
from ampaudit.report.model import Comparison
from tests.support.paths import GOLDEN
from tests.support.saved import HOSTILE, NAMES, saved, saved_report
from tests.support.tuned import SENSITIVITY, hostile, tuned, tuned_short

Golden = Callable[[str, str], None]
TOLD = ("markdown", *(name for name, form in FORMAT_REGISTRY.items() if form.needs == "suites"))
TABLES = tuple(name for name, form in FORMAT_REGISTRY.items() if form.needs == "rows")
TUNED = {
    "tuning": tuned,
    "tuning-short": tuned_short,
    "tuning-hostile": lambda: hostile("".join(text[:60] for text in HOSTILE)),
}
TUNED_FORMS = ("markdown", *TABLES, "html")


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize("name", NAMES)
def test_text(golden: Golden, name: str, width: int) -> None:
    text = as_text(lambda console: console.print(for_terminal(saved(name))), width, terminal=True)
    assert all(len(line) <= width for line in text.splitlines())
    golden(f"{name}-{width}.txt", text)


@pytest.mark.parametrize("verbosity", [-1, 1])
@pytest.mark.parametrize("name", ["overflow", "gradients", "training"])
def test_quiet_and_verbose_text(golden: Golden, name: str, verbosity: int) -> None:
    text = as_text(lambda console: console.print(for_terminal(saved(name), verbosity)), 100, terminal=True)
    golden(f"{name}-{'quiet' if verbosity < 0 else 'verbose'}.txt", text)


def linted() -> LintReport:
    """Errors and warnings, one with a repair, one suppressed, one in Markdown; what was not read."""
    pages = all_pages()
    hidden = pages["AMP807"].bad.code.replace("1.0)", "1.0)  # ampaudit: ignore[AMP807] sign only")
    names = {
        "train.py": pages["AMP803"].bad.code,
        "model.py": pages["AMP861"].bad.code,
        "old.py": "print 'x'\n",
    }
    names |= {
        "hidden.py": hidden,
        "weights.py": pages["AMP820"].bad.code,
        "notes.md": f"```python\n{pages['AMP840'].bad.code}```\n",
    }
    files = [lint_text(text, name, RuleSelection()) for name, text in names.items()]
    return lint_report(files, LintConfig())


@pytest.mark.parametrize("verbosity", [-1, 0, 1])
def test_lint(golden: Golden, verbosity: int) -> None:
    text = as_text(lambda console: console.print(for_terminal(linted(), verbosity), crop=False), 80)
    golden(f"lint-{('quiet', 'normal', 'verbose')[verbosity + 1]}.txt", text)


def machine_text(document: Document, form: str) -> str:
    """The document in a format; SARIF without the texts of pages, which have a test of their own."""
    text = as_file(document, form)
    if form != "sarif":
        return text
    log = json.loads(text)
    for run in log["runs"]:
        for rule in run["tool"]["driver"]["rules"]:
            rule.pop("help", None)
            rule.pop("fullDescription", None)
    return json.dumps(log, indent=1, ensure_ascii=False) + "\n"


@pytest.mark.parametrize("form", ["json", *TOLD])
def test_lint_for_machines(golden: Golden, form: str) -> None:
    golden(f"lint.{form}", machine_text(linted(), form))


@pytest.mark.parametrize("form", TOLD)
@pytest.mark.parametrize("name", ["overflow", "policies", "training", "check", "sweep"])
def test_formats_for_machines(golden: Golden, name: str, form: str) -> None:
    golden(f"{name}.{form}", machine_text(saved(name), form))


@pytest.mark.parametrize("form", TABLES)
@pytest.mark.parametrize("name", ["overflow", "training"])
def test_tables(golden: Golden, name: str, form: str) -> None:
    golden(f"{name}.{form}", as_file(saved(name), form))


@pytest.mark.parametrize("name", ["overflow", "policies", "gradients", "sweep"])
def test_the_words_of_the_page(golden: Golden, name: str) -> None:
    golden(f"{name}.html", words_of_page(saved(name)))


def words_of_page(document: Document) -> str:
    """Without its scripts, its style and the pages of codes, which have tests of their own."""
    text = to_html(document)
    text = re.sub(r"<(script|style)\b[^>]*>.*?</\1>", "", text, flags=re.S)
    text = re.sub(r'<meta http-equiv="Content-Security-Policy"[^>]*>', "", text)
    text = re.sub(r'<section class="pages".*?</section>', "", text, flags=re.S)
    return re.sub(r"\n\s*\n+", "\n", text)


@pytest.mark.parametrize("name", TUNED)
def test_tuning(golden: Golden, name: str) -> None:
    document = TUNED[name]()
    for width in (80, 200):
        text = as_text(lambda console: console.print(for_terminal(document)), width, terminal=True)
        assert all(len(line) <= width for line in text.splitlines())
        golden(f"{name}-{width}.txt", text)
    for verbosity, kind in ((-1, "quiet"), (1, "verbose")):
        shown = as_text(
            lambda console, v=verbosity: console.print(for_terminal(document, v)), 100, terminal=True
        )  # type: ignore[misc]
        golden(f"{name}-{kind}.txt", shown)
    for form in TUNED_FORMS:
        golden(f"{name}.{form}", words_of_page(document) if form == "html" else as_file(document, form))


def test_sensitivity(golden: Golden) -> None:
    report = replace(saved_report("gradients"), sections={"sensitivity": SENSITIVITY})
    for width in (80, 200):
        text = as_text(lambda console: console.print(for_terminal(report)), width, terminal=True)
        golden(f"sensitivity-{width}.txt", text)
    golden("sensitivity.markdown", as_file(report, "markdown"))


def test_differences(golden: Golden) -> None:
    policies = saved("policies")
    assert isinstance(policies, Comparison)
    better = diff(policies.reports[0], policies.reports[2])
    worse = diff(policies.reports[2], policies.reports[0])
    for name, found in (("better", better), ("worse", worse)):
        for width in (80, 200):
            shown = as_text(lambda console, f=found: console.print(for_terminal(f)), width, terminal=True)  # type: ignore[misc]
            golden(f"diff-{name}-{width}.txt", shown)
    golden("diff-worse.md", as_file(worse, "markdown"))
    golden("diff-worse.json", to_json(worse))


def helps(command: click.Command, name: str) -> list[tuple[str, list[str]]]:
    if isinstance(command, click.Group):
        context = click.Context(command)
        subs = [command.get_command(context, sub) for sub in command.list_commands(context)]
        inner = [pair for sub in subs if sub is not None for pair in helps(sub, f"{name} {sub.name}")]
        return [(name, [*name.split()[1:], "--help"]), *inner]
    return [(name, [*name.split()[1:], "--help"])]


@pytest.mark.parametrize(("name", "arguments"), helps(main, "ampaudit"), ids=lambda v: str(v))
def test_help(golden: Golden, name: str, arguments: list[str]) -> None:
    done = CliRunner().invoke(main, arguments, prog_name="ampaudit", terminal_width=100)
    assert done.exit_code == 0
    golden(f"help-{name.replace(' ', '-')}.txt", done.output)


def test_every_command_has_a_golden_help() -> None:
    names = {path.name for path in (GOLDEN).glob("help-*")}
    assert {f"help-ampaudit-{name}.txt" for name in COMMANDS} <= names


@pytest.mark.parametrize("arguments", [["explain"], ["explain", "AMP204"], ["rules", "list"]], ids=" ".join)
def test_lists_and_pages(golden: Golden, arguments: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    done = CliRunner().invoke(main, arguments, prog_name="ampaudit")
    assert done.exit_code == 0
    golden(f"{'-'.join(arguments)}.txt", done.output)


def test_no_golden_file_is_left_over(request: pytest.FixtureRequest) -> None:
    """Every file in the folder is named in this module's tests; one that is not would never be compared."""
    known = {f"{n}-{w}.txt" for n in NAMES for w in (80, 200)}
    known |= {f"{n}-{k}.txt" for n in ("overflow", "gradients", "training") for k in ("quiet", "verbose")}
    known |= {f"{n}.{f}" for n in ("overflow", "policies", "training", "check", "sweep") for f in TOLD}
    known |= {f"{n}.{f}" for n in ("overflow", "training") for f in TABLES}
    known |= {"overflow.html", "policies.html", "gradients.html", "sweep.html"}
    shown = (*(f"-{kind}.txt" for kind in ("80", "200", "quiet", "verbose")), *(f".{f}" for f in TUNED_FORMS))
    known |= {f"{n}{end}" for n in TUNED for end in shown}
    known |= {"sensitivity-80.txt", "sensitivity-200.txt", "sensitivity.markdown"}
    known |= {f"diff-{n}-{w}.txt" for n in ("better", "worse") for w in (80, 200)}
    known |= {"diff-worse.md", "diff-worse.json", "explain.txt", "explain-AMP204.txt", "rules-list.txt"}
    known |= {f"lint-{k}.txt" for k in ("quiet", "normal", "verbose")} | {
        f"lint.{f}" for f in ("json", *TOLD)
    }
    known |= {f"help-{name.replace(' ', '-')}.txt" for name, _ in helps(main, "ampaudit")}
    files = {path.name for path in GOLDEN.iterdir()}
    missing, left_over = sorted(known - files), sorted(files - known)
    written = request.config.getoption("--refresh-golden")  # by tests that may come after this one
    assert written or not missing, f"run pytest tests -k golden --refresh-golden, which writes {missing}"
    assert not left_over, f"delete these files, or add them to `known` in this test: {left_over}"


def test_a_finding_of_a_later_version_can_be_shown() -> None:
    report = saved_report()
    unknown = replace(report, findings=(replace(report.findings[0], code="AMP899"),))
    for form in (*TOLD, *TABLES, "html", "json"):
        assert "AMP899" in as_file(unknown, form), f"{form} must show the code of each finding"
    assert "AMP899 overflow" in as_text(lambda console: console.print(for_terminal(unknown)), 100)
