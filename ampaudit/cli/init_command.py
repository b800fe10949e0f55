"""``ampaudit init``: writes a first model file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from ampaudit.cli.options import FILE, debug_option, file_option, force_option
from ampaudit.core.text import escape_control

if TYPE_CHECKING:
    from ampaudit.cli.project_models import ModelClass

_NAME = "audit_model.py"
_FILE = '''\
"""What `ampaudit scan {file}` audits: a model, and inputs like those that it will be used on."""

{imports}


def get_model():
    {make}


def example_inputs():
    return {inputs}
'''


@click.command("init")
@click.argument("directory", type=FILE, default=".")
@file_option("-o", "--output", help=f"File to write.  [default: {_NAME} in DIRECTORY]")
@force_option
@debug_option
def init_command(directory: Path, output: Path | None, *, force: bool, debug: bool) -> None:
    """Write a model file for the project in DIRECTORY, without running its code.

    The file builds the model as the project does and makes random inputs, as far as the code shows how. Adapt
    it, then run 'ampaudit scan' on it.
    """
    from ampaudit.cli.project_models import models_of
    from ampaudit.core.errors import InputError
    from ampaudit.core.files import check_writable, write_text
    from ampaudit.core.untrusted import describe_path
    from ampaudit.linter.discovery import find_files

    if not directory.is_dir():
        what = "is not a directory" if directory.exists() else "no such directory"
        raise InputError(f"{describe_path(directory)}: {what}", hint="name the directory of a project")
    output = directory / _NAME if output is None else output
    check_writable(output, force=force)
    files = find_files([str(directory)], exclude=["test*", "conftest.py"], gitignore=True)
    models = models_of(path for path in files if path.suffix == ".py" and path.resolve() != output.resolve())
    write_text(output, _text(models, directory, output), force=force)
    for sentence in _sentences(models, output):
        click.echo(escape_control(sentence))


def _text(models: Sequence[ModelClass], directory: Path, output: Path) -> str:
    if not models:
        make = 'raise NotImplementedError("return your model")'
        return _FILE.format(
            file=output.name, imports="import torch", make=make, inputs="torch.randn(1, 3, 224, 224)"
        )
    model, root = models[0], output.parent.resolve()
    file = model.file.resolve()
    module = _module(file.relative_to(root if file.is_relative_to(root) else directory.resolve()))
    imports = f"import torch\nfrom {module} import {model.name}"
    if not all(part.isidentifier() for part in module.split(".")):
        loaded = f"{model.name} = importlib.import_module({module!r}).{model.name}"
        imports = f"import importlib\n\nimport torch\n\n{loaded}"
    if model.arguments is not None:
        make = f"return {model.name}({model.arguments})  # as in {escape_control(model.called_at)}"
    elif model.required:
        make = f"return {model.name}({', '.join(f'{n}=...' for n in model.required)})  # fill these in"
    else:
        make = f"return {model.name}()"
    inputs = f"{model.inputs}  # {escape_control(model.reason)}"
    return _FILE.format(file=output.name, imports=imports, make=make, inputs=inputs)


def _module(file: Path) -> str:
    """Return the dotted name by which a file of a project is imported."""
    parts = list(file.with_suffix("").parts)
    if parts[0] in ("src", "lib") and len(parts) > 1:
        del parts[0]
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 1 else parts)


def _sentences(models: Sequence[ModelClass], output: Path) -> list[str]:
    if not models:
        return [f"{output} written; the project has no nn.Module, so fill it in"]
    model, others = models[0], [other.name for other in models[1:]]
    sentences = [f"{output} written: {model.name} of {model.file.as_posix()}:{model.line}"]
    if others:
        sentences.append(f"other models: {', '.join(others)}")
    if model.required and model.arguments is None:
        sentences.append(f"fill in what {model.name} needs: {', '.join(model.required)}")
    if model.trains:
        place = f"{model.file.as_posix()}:{model.trains}"
        sentences.append(f"{place} would train when it is imported: move it under if __name__ == '__main__':")
    return [*sentences, f"next: check its inputs, then run: ampaudit scan {output}"]
