"""Completion in a shell, and the groups of the help text."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import click
import pytest
from click.shell_completion import BashComplete

from ampaudit.cli.options import GroupedCommand
from ampaudit.cli.program import COMMANDS, main
from ampaudit.devices.catalogue import all_devices
from ampaudit.findings.pages import all_pages
from ampaudit.findings.pages.page import code_titles
from ampaudit.policy.load import policy_names


def completed(*words: str) -> list[str]:
    """What a shell offers for the last word, files as ``<file>``."""
    shell = BashComplete(main, {}, "ampaudit", "_AMPAUDIT_COMPLETE")
    found = shell.get_completions(list(words[:-1]), words[-1])
    return ["<file>" if item.type == "file" else item.value for item in found]


@pytest.mark.parametrize(
    ("words", "offered"),
    [
        (("sca",), ["scan"]),
        (("scan", "--policy", "torch-c"), ["torch-cpu", "torch-cuda"]),
        (("scan", "--policy", "half,torch-c"), ["half,torch-cpu", "half,torch-cuda"]),
        (("scan", "--policy", "./mi"), ["<file>"]),
        (("scan", "--policy", ""), policy_names()),
        (("train", "m.py", "--policy", "paddle-o"), ["paddle-o1", "paddle-o2", "paddle-od"]),
        (("rules", "show", "hal"), ["half"]),
        (("rules", "diff", "half", "torch-cu"), ["torch-cuda"]),
        (("rules", "validate", "mi"), ["<file>"]),
        (("scan", "--ignore", "amp101"), ["AMP101"]),
        (("check", "--allow", "AMP10"), [c for c in all_pages() if c.startswith("AMP10")]),
        (("lint", "--select", "AMP"), [c for c in all_pages() if c.startswith("AMP8")]),
        (("explain", "AMP99"), [c for c in all_pages() if c.startswith("AMP99")]),
        (("devices", "h2"), [d for d in all_devices() if d.startswith("h2")]),
        (("bench", "m.py", "--for", ""), list(all_devices())),
        (("scan", "--dtype", "b"), ["bfloat16"]),
        (("scan", "--format", "sa"), ["sarif"]),
        (("scan", "mod"), ["<file>"]),
        (("check", "one.py", "mod"), ["<file>"]),
        (("lint", "train"), ["<file>"]),
        (("convert", "m.py", "--weights", "w"), ["<file>"]),
    ],
)
def test_what_is_offered(words: tuple[str, ...], offered: list[str]) -> None:
    assert offered
    assert completed(*words) == offered


def test_codes_have_the_titles_of_their_pages() -> None:
    assert dict(code_titles()) == {code: page.title for code, page in all_pages().items()}


@pytest.mark.parametrize("name", sorted(COMMANDS))
def test_what_completion_takes_is_what_the_command_takes(name: str) -> None:
    """No parameter loses its type: only plain text is replaced."""
    command = main.get_command(click.Context(main), name)
    assert command is not None
    for parameter in command.params:
        if isinstance(parameter, click.Argument):
            assert parameter.type.name in ("text", "path"), parameter.name


WORDS = ("scan --policy torch-c", "bench m.py --for h1", "explain AMP10")


@pytest.mark.parametrize("line", WORDS)
def test_completion_in_bash_needs_no_torch(line: str) -> None:
    """In bash, with the function that the documentation installs."""
    bash, program = shutil.which("bash"), Path(sys.executable).with_name("ampaudit")
    if bash is None or not program.exists():
        pytest.skip("no bash, or no console script beside this Python")
    words = line.split()
    script = (
        f'eval "$(_AMPAUDIT_COMPLETE=bash_source {program})"\n'
        f"COMP_WORDS=(ampaudit {line}); COMP_CWORD={len(words)}\n"
        f"_ampaudit_completion {program}\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    env = {**os.environ, "PYTHONPROFILEIMPORTTIME": "1"}
    made = subprocess.run([bash, "-c", script], capture_output=True, text=True, env=env, timeout=60)
    assert made.stdout.split()[0].startswith(words[-1]), made.stderr[-500:]
    assert "ampaudit.cli.program" in made.stderr
    assert " torch\n" not in made.stderr


@pytest.mark.parametrize(
    ("shell", "given", "offered"),
    [
        ("zsh", {"COMP_WORDS": "ampaudit explain amp10", "COMP_CWORD": "2"}, "plain\nAMP101\noverflow\n"),
        ("fish", {"COMP_WORDS": "ampaudit explain", "COMP_CWORD": "amp10"}, "AMP101"),
    ],
)
def test_other_shells_show_titles(shell: str, given: dict[str, str], offered: str) -> None:
    def answered(how: str, **more: str) -> str:
        env = {**os.environ, **more, "_AMPAUDIT_COMPLETE": f"{shell}_{how}"}
        start = "import sys; sys.argv = ['ampaudit']; from ampaudit.cli.main import run; run()"
        made = subprocess.run(
            [sys.executable, "-c", start], capture_output=True, text=True, env=env, timeout=60
        )
        return made.stdout.replace("\r", "")

    assert "_AMPAUDIT_COMPLETE" in answered("source")
    assert offered in answered("complete", **given)


def test_every_option_is_in_one_group_of_the_help_text() -> None:
    grouped = 0
    for name in COMMANDS:
        context = click.Context(main, info_name="ampaudit", **main.context_settings)
        command = main.get_command(context, name)
        if isinstance(command, GroupedCommand):
            grouped += 1
            inner = click.Context(command, info_name=name, parent=context)
            text = command.get_help(inner)
            for parameter in command.get_params(inner):
                if isinstance(parameter, click.Option):
                    assert text.count(f"{parameter.opts[-1]} ") >= 1, parameter.name
            assert text.rstrip().endswith("Show this message and exit.")
            assert text.index("\nOptions:") < text.index("\nOutput:")
    assert grouped == 10
