"""The options of every command that takes a model, and how the model is loaded."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click

if TYPE_CHECKING:
    from ampaudit.source import ModelSource

__all__ = ["load_source", "model_options"]

Command = TypeVar("Command", bound=Callable[..., Any])
_FILE = click.Path(path_type=Path)
_OPTIONS = (
    click.option("--weights", type=_FILE, metavar="FILE", help="Checkpoint: safetensors, or .pt state_dict."),
    click.option(
        "--inputs",
        type=_FILE,
        metavar="FILE",
        help="Python file with example_inputs() or batches(), and loss(); or safetensors.",
    ),
    click.option("--batches", type=click.IntRange(1), default=1, show_default=True, help="Batches to run."),
    click.option("--seed", type=int, default=0, show_default=True),
    click.option("--train/--eval", default=False, help="The model's mode; --eval is the default."),
    click.option("--stream", is_flag=True, help="Leave weights on disk until an op needs them."),
)


def model_options(command: Command) -> Command:
    """Add the options that ``load_source`` reads."""
    for option in reversed(_OPTIONS):
        command = option(command)
    return command


def load_source(location: str, options: dict[str, Any]) -> ModelSource:
    """The model at a location; torch is imported here.

    Raises:
        AuditError: see ``ampaudit.source``.
    """
    from ampaudit.cli.memory import keep_freed_memory, return_freed_memory
    from ampaudit.source.interface import SourceOptions
    from ampaudit.source.open import open_source

    if options["stream"]:  # which is there to save memory
        return_freed_memory()
    else:
        keep_freed_memory()
    names = ("batches", "seed", "weights", "inputs", "train", "stream")
    return open_source(location, SourceOptions(**{name: options[name] for name in names}))
