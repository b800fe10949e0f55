"""Completes policies, codes, devices and files in a shell, without loading torch."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any, TypeAlias

import click
from click.shell_completion import CompletionItem
from click.types import StringParamType

from ampaudit.core.formats import LOW_PRECISION_NAMES

__all__ = ["add_completion"]

Names: TypeAlias = Callable[[], Iterator[tuple[str, str]]]


class Completed(StringParamType):
    """Text that is one of known names or, where ``files`` is set, a path; several are split by commas."""

    def __init__(self, names: Names | None = None, *, files: bool = False) -> None:
        self.names, self.files = names, files

    def shell_complete(
        self, ctx: click.Context, param: click.Parameter, incomplete: str
    ) -> list[CompletionItem]:
        """Return the names that begin with the last part of what is typed; else let the shell list files."""
        del ctx, param
        before, comma, last = incomplete.rpartition(",")
        named = self.names() if self.names is not None else ()
        found = [
            CompletionItem(f"{before}{comma}{name}", help=text or None)
            for name, text in named
            if name.lower().startswith(last.lower())
        ]
        if self.files and (not found or os.sep in incomplete):
            return [CompletionItem(incomplete, type="file")]
        return found


def add_completion(command: click.Command) -> click.Command:
    """Let the options and arguments of a command complete by their names, and return it."""
    if isinstance(command, click.Group):
        for inner in command.commands.values():
            add_completion(inner)
    for parameter in command.params:
        made = _BY_NAME.get(f"{command.name} {parameter.name}") or _BY_NAME.get(parameter.name or "")
        if made is not None and isinstance(parameter.type, StringParamType):
            parameter.type = made
    return command


def _policies() -> Iterator[tuple[str, str]]:
    from ampaudit.policy.paths import policy_names

    return ((name, "") for name in policy_names())


def _codes(prefix: str = "") -> Names:
    def names() -> Iterator[tuple[str, str]]:
        from ampaudit.report.pages.page import code_titles

        return ((code, title) for code, title in code_titles() if code.startswith(prefix))

    return names


def _devices() -> Iterator[tuple[str, str]]:
    from ampaudit.devices.catalogue import all_devices

    return ((name, device.name) for name, device in all_devices().items())


def _dtypes() -> Iterator[tuple[str, str]]:
    return ((name, "") for name in LOW_PRECISION_NAMES)


def _accelerators() -> Iterator[tuple[str, str]]:
    return ((name, "") for name in ("auto", "cpu", "cuda", "cuda:0", "mps", "xpu"))


_POLICY, _FILES, _ALL_CODES = Completed(_policies, files=True), Completed(files=True), Completed(_codes())
_LINT_CODES, _DEVICE = Completed(_codes("AMP8")), Completed(_devices)
# by the name of a parameter, or of a command and its parameter
_BY_NAME: dict[str, Any] = {
    **dict.fromkeys(("policy", "policies", "diff first", "diff second"), _POLICY),
    **dict.fromkeys(("model", "targets", "paths", "validate file"), _FILES),
    **dict.fromkeys(("code", "allow", "ignore"), _ALL_CODES),
    **dict.fromkeys(("lint select", "lint ignore"), _LINT_CODES),
    **dict.fromkeys(("target", "devices name"), _DEVICE),
    "dtype": Completed(_dtypes),
    "device": Completed(_accelerators),
}
