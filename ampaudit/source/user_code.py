"""Runs a user's Python file or import, and reports its errors in one line."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Final

from ampaudit.core.errors import AuditError, SourceError, first_line, text_of
from ampaudit.core.text import escape_control
from ampaudit.trace.failure import failing_lines

_NO_DEVICE = ("not compiled with CUDA", "No CUDA GPUs", "no NVIDIA driver", "HIP GPUs", "XPU", "MPS backend")

_USER_DIRECTORIES: dict[str, str] = {}  # working directory of the user's code, by ours when it was called

USER_MODULE_PREFIX: Final = "_ampaudit_user_"  # of the names of modules that an option loads by path


def module_from_file(path: Path, factory: str = "get_model") -> ModuleType:
    """Import a Python file, with its directory first on the import path while it loads.

    ``factory`` is a name in it, which the hint of an error suggests scanning.

    Raises:
        SourceError: The file does not exist, is not Python, or raises.
    """
    if not path.is_file():
        raise SourceError(f"no such file: {path}", hint="check the path of the model file")
    name = f"{USER_MODULE_PREFIX}{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise SourceError(
            f"{path}: not a Python file", hint="models and inputs are read from files that end in .py"
        )
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    _USER_DIRECTORIES.clear()
    with _first_on_path(str(path.resolve().parent)), calling_user_code(f"{path}"):
        try:
            spec.loader.exec_module(module)
        except ImportError as error:
            if "relative import" not in text_of(error):
                raise
            root, dotted = _in_package(path.resolve())
            raise SourceError(
                f"{path} imports relatively, which only works in its package",
                hint=f"name it as a module: ampaudit scan {dotted}:{factory}, in the directory {root}",
            ) from error
    return module


def _in_package(path: Path) -> tuple[Path, str]:
    """Return the directory above a file's package and the dotted name of its module."""
    names, root = [path.parent.name, path.stem], path.parent.parent
    while (root / "__init__.py").is_file():
        names, root = [root.name, *names], root.parent
    return root, ".".join(names)


def import_module_named(name: str) -> ModuleType:
    """Import a module by its dotted name, also from the current directory.

    Raises:
        SourceError: The module cannot be found, or raises.
    """
    if name not in sys.modules:
        _USER_DIRECTORIES.clear()
    with _first_on_path(_working_directory()), calling_user_code(f"import {name}"):
        if not _exists(name):
            raise SourceError(
                f"no module named {name!r}", hint="give package.module:factory, or the path of a .py file"
            )
        return importlib.import_module(name)


@contextlib.contextmanager
def _first_on_path(directory: str) -> Iterator[None]:
    """Put a directory first on the import path while active, and last afterwards.

    Afterwards, the user's functions can still import files of the directory, and no file there shadows a
    module that torch imports.
    """
    sys.path.insert(0, directory)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):  # the user's code may have removed it
            sys.path.remove(directory)
        if directory not in sys.path:
            sys.path.append(directory)


def _exists(name: str) -> bool:
    """Return whether a module of that dotted name exists."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError as error:
        if error.name is not None and (name == error.name or name.startswith(f"{error.name}.")):
            return False
        raise


@contextlib.contextmanager
def calling_user_code(what: str) -> Iterator[None]:
    """Redirect the user's prints to stderr, and report exceptions by the line that failed.

    If the user's code changes the working directory, this holds for later calls of user code only, so that
    relative paths of the command line keep their meaning.
    """
    try:
        with _own_directory(), contextlib.redirect_stdout(sys.stderr), locating_failures(what):
            yield
    except SystemExit as error:
        raise SourceError(
            f"{what} called sys.exit({error.code!r})", hint="keep scripts under if __name__ == '__main__':"
        ) from error


@contextlib.contextmanager
def _own_directory() -> Iterator[None]:
    """Enter the directory to which the user's code changed before, and leave it at the end."""
    here = _working_directory()
    _change_to(_USER_DIRECTORIES.get(here, here))
    try:
        yield
    finally:
        _USER_DIRECTORIES[here] = _working_directory()
        _change_to(here)


def _working_directory() -> str:
    """Return the working directory; empty if it was removed."""
    with contextlib.suppress(OSError):
        return os.getcwd()
    return ""


def _change_to(directory: str) -> None:
    with contextlib.suppress(OSError):
        if directory != _working_directory():
            os.chdir(directory)


@contextlib.contextmanager
def locating_failures(what: str) -> Iterator[None]:
    """Report exceptions as a SourceError that names the line that failed."""
    try:
        yield
    except (AuditError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except SyntaxError as error:
        message = escape_control(error.msg)  # a codec may quote the file
        raise SourceError(
            f"{error.filename or what}:{error.lineno or 1}: syntax error: {message}", hint="correct the file"
        ) from error
    except MemoryError as error:
        raise SourceError(f"{what}: out of memory", hint="make the model or its inputs smaller") from error
    except BaseException as error:  # such as pytest's Skipped
        user_line, _ = failing_lines(error.__traceback__)
        where = f"{user_line.file}:{user_line.line}: " if user_line else f"{what}: "
        hint = "run the file with Python to see the full traceback, or pass --debug"
        if isinstance(error, ModuleNotFoundError):
            hint = f"install {error.name!r} in the environment that runs ampaudit"
            here = Path(str(error.name).partition(".")[0])
            if here.is_dir() or here.with_suffix(".py").is_file():
                hint = f"{here} is in the current directory: name the model as package.module:get_model"
        elif user_line is None and isinstance(error, TypeError):
            hint = f"{what} is called as it stands here; give its parameters defaults"
        elif any(words in text_of(error) for words in _NO_DEVICE):
            hint = "this machine has no such device: create models and inputs on the CPU; --device moves them"
        raise SourceError(f"{where}{type(error).__name__}: {first_line(error)}", hint=hint) from error
