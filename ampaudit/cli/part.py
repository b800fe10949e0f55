"""Runs one part of a scan, and writes it with its options for ``ampaudit merge``."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any

import click
from click.core import ParameterSource

from ampaudit.audit.config import ScanConfig
from ampaudit.cli.options import explicit_options
from ampaudit.cli.terminal import print_notes
from ampaudit.core.errors import InputError
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.torchrun import rank_and_world_size

# options of the audit that a part stores; consent to run a checkpoint's code is not among them
_PART_OPTIONS = {*ScanConfig.model_fields, *SourceConfig.model_fields} - {"trust", "stress_dir"}


def write_scan_part(
    command: click.Command,
    audit: Callable[..., Any],
    model: str,
    options: dict[str, Any],
) -> None:
    """Run a part of the batches with ``audit``, and write its records."""
    from ampaudit.parallel.parts import FilePart, parse_part
    from ampaudit.run.share import PartDone

    if options["output"] is None:
        raise click.UsageError("--part writes a file: add -o part-1.json")
    if options["output"].suffix.lower() != ".json":
        raise click.UsageError("--part writes JSON, whose file must end in .json: -o part-1.json")
    if rank_and_world_size() is not None:
        raise click.UsageError("--part is not for torchrun, whose ranks divide the batches anyway")
    explicit = explicit_options(options)
    if "form" in explicit:
        raise click.UsageError("--part writes a part, not a report: give --format to ampaudit merge")
    part = FilePart(*parse_part(options["part"]), _words(command, options, explicit))
    share: Any = part
    if options["resume"] is not None:
        from ampaudit.parallel.resume import ResumedShare

        share = ResumedShare(options["resume"], part)
    try:
        audit(model, options, share, explicit)
    except PartDone:
        print_notes(part.save(options["output"], force=options["force"]))


def _words(command: click.Command, options: dict[str, Any], explicit: Collection[str]) -> list[str]:
    """Return the options of the audit that the user has set, as words of a command line."""
    words: list[str] = []
    for parameter in command.params:
        name = parameter.name or ""
        if name not in explicit or name not in _PART_OPTIONS:
            continue
        value = options[name]
        if isinstance(value, bool):
            words.append(parameter.opts[0] if value else parameter.secondary_opts[0])
        else:
            for item in value if isinstance(value, list | tuple) else (value,):
                words += [parameter.opts[0], str(item)]
    return words


def parse_part_options(
    command: click.Command, model: str, words: Sequence[str]
) -> tuple[dict[str, Any], frozenset[str]]:
    """Parse the stored options of a part; return all options, and the names of those that the user had set.

    Raises:
        InputError: An option does not belong to an audit.
    """
    try:
        parsed = command.make_context("scan", [model, *words])
    except click.ClickException as error:
        raise InputError(f"the options of the parts: {error.format_message()}") from None
    names = frozenset(
        n for n in parsed.params if parsed.get_parameter_source(n) is ParameterSource.COMMANDLINE
    )
    if foreign := sorted(names - _PART_OPTIONS - {"model"}):
        raise InputError(
            f"the parts name an option that audits do not have: {foreign[0]}", hint="write them again"
        )
    return {name: value for name, value in parsed.params.items() if name != "model"}, names - {"model"}
