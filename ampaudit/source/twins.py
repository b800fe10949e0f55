"""Loads the twins of custom ops from installed packages and from a file."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path

from ampaudit.core.errors import AuditError, SourceError, first_line
from ampaudit.core.untrusted import describe
from ampaudit.source.user_code import calling_user_code, module_from_file
from ampaudit.trace.twins import known_twins, with_twins

GROUP = "ampaudit.twins"
_LOADED: set[str] = set()  # entry points loaded in this process


@contextmanager
def using_twins(path: Path | None = None) -> Iterator[None]:
    """Use the twins of custom ops while active: those of installed packages, and those of a file.

    Raises:
        SourceError: A package or the file cannot be loaded, or the file registers no twin.
    """
    for entry in entry_points(group=GROUP):
        if entry.value in _LOADED:
            continue
        owner = entry.dist.name if entry.dist is not None else "a package"
        try:
            with calling_user_code(f"entry point {entry.name} of {owner}"):
                plugin = entry.load()
                if callable(plugin):
                    plugin()
        except AuditError as error:
            text = f"{owner} declares twins that cannot be loaded ({entry.value}): {first_line(error)}"
            raise SourceError(text, hint=f"repair or uninstall {owner}") from error
        _LOADED.add(entry.value)
    if path is not None:
        before = known_twins()
        module_from_file(path)
        if known_twins() == before:
            hint = "call ampaudit.twin('mylib::op', function) in it, or decorate functions with it"
            raise SourceError(f"--twins {describe(path)} registers no twin", hint=hint)
    with with_twins():
        yield
