"""Command-line options, generated from the fields of configuration records or shared by commands."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeVar, cast, get_args, get_origin

import click
from click.core import ParameterSource
from pydantic.fields import FieldInfo

from ampaudit.core.config import COMMAND_LINE, Config, Option, limits_of, long_flag, option_of, value_type
from ampaudit.core.errors import UsageError
from ampaudit.core.torchrun import rank_and_world_size
from ampaudit.core.untrusted import describe
from ampaudit.render.render import FORMAT_REGISTRY, OUTPUT_FORMATS, chosen_format, formats_of

if TYPE_CHECKING:
    from ampaudit.parallel.ranks import RankShare

Command = TypeVar("Command", bound=Callable[..., Any])
Record = TypeVar("Record", bound=Config)
FILE = click.Path(path_type=Path)

_FLAGS_WIDTH = 30  # click's limit; longer ones have their text on the next line
# headings of the help text, and the names of their options; other options come first
_GROUPS = {
    "Model and inputs": "weights inputs args input text images audio twins batches sweep against train "
    "stream trust",
    "Findings": "fail_on select ignore exclude allow min_headroom min_sqnr max_metric_drop max_fp32_share "
    "baseline update_baseline per_file_ignores notes gitignore",
    "Fixes": "advise diff advise_policy fix",
    "Gradients": "backward loss_scale",
    "Proofs": "prove stress static assume",
    "Processes": "jobs timeout max_memory",
    "Output": "form output tuned_policy plot tensorboard force quiet verbose config debug",
}
_GROUP_OF = {name: group for group, names in _GROUPS.items() for name in names.split()}


class GroupedCommand(click.Command):
    """A command whose help lists its options in groups; under ``torchrun``, it divides its work itself."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write a section per group with more than one option, with one width for the first column."""
        groups: dict[str, list[tuple[str, str]]] = {name: [] for name in ("Options", *_GROUPS)}
        parameters = [p for p in self.get_params(ctx) if isinstance(p, click.Option)]
        used = Counter(map(_group, parameters))
        for option in parameters:
            group = _group(option)
            record = option.get_help_record(ctx)
            if record is not None:
                groups[group if used[group] > 1 else "Options"].append(record)
        width = min(_FLAGS_WIDTH, max(len(flags) for rows in groups.values() for flags, _ in rows))
        for group, rows in groups.items():
            if rows:
                with formatter.section(group):
                    formatter.write_dl([(f"{flags:{width}}", text) for flags, text in rows])


class FirstRankCommand(GroupedCommand):
    """A command that the first process of ``torchrun`` runs; the others end with its exit code."""

    def invoke(self, ctx: click.Context) -> Any:
        """Run the command."""
        with among_ranks() as share:
            if share is not None:
                share.finish()
            return super().invoke(ctx)


def _group(option: click.Option) -> str:
    """Return the group of an option; click's versions differ in how they name --help."""
    return "Output" if "--help" in option.opts else _GROUP_OF.get(option.name or "", "Options")


def _one_path(context: click.Context, parameter: click.Parameter, paths: tuple[Path, ...]) -> Path | None:
    """Return the path of an option that may occur once; click would silently take the last of several."""
    if len(paths) > 1:
        raise click.BadParameter(f"takes one path, not {len(paths)}: {', '.join(map(describe, paths))}")
    return paths[0] if paths else None


file_option = partial(click.option, type=FILE, multiple=True, callback=_one_path)
configuration_option = file_option(
    "--config",
    metavar="FILE",
    help="Configuration file.  [default: the nearest pyproject.toml]",
)
debug_option = click.option("--debug", is_flag=True, help="Show Python tracebacks of errors.")
force_option = click.option("--force", is_flag=True, help="Overwrite existing files.")
quiet_option = click.option("-q", "--quiet", is_flag=True, help="Print only the verdict.")


def report_options(
    kind: str | None, verbose: str = "", *, quiet: bool = True, also: Sequence[str] = ()
) -> Callable[[Command], Command]:
    """Add ``output_options`` and ``--debug``, and with a help text ``--verbose`` (and ``--quiet``)."""

    def decorate(command: Command) -> Command:
        command = debug_option(command)
        if verbose:
            command = verbose_option(verbose)(command)
            command = quiet_option(command) if quiet else command
        return output_options(kind, also)(command)

    return decorate


def output_options(kind: str | None, also: Sequence[str] = ()) -> Callable[[Command], Command]:
    """Add ``--format``, ``--output`` and ``--force``, and check all outputs before the command begins.

    Args:
        kind: Kind of document that the command makes, which determines the formats; ``None`` for any.
        also: Further suffixes of ``--output``, for files that the command writes itself.
    """
    forms = formats_of(kind) if kind is not None else tuple(FORMAT_REGISTRY)
    suffixes = ", ".join([*(OUTPUT_FORMATS[form][0] for form in forms if OUTPUT_FORMATS[form]), *also[:1]])
    add_format = click.option(
        "--format",
        "form",
        type=click.Choice(forms, case_sensitive=False),
        help="Output format.  [default: by the suffix of --output, else text]",
    )
    add_output = file_option("-o", "--output", metavar="FILE", help=f"Write the report to FILE: {suffixes}.")

    def decorate(command: Command) -> Command:
        @wraps(command)
        def checked(*arguments: Any, **options: Any) -> Any:
            if options["output"] == Path("-"):  # standard output, as in other programs
                options["output"] = None
            is_rules = options["output"] is not None and options["output"].suffix.lower() in also
            options["form"] = chosen_format(options["form"], None if is_rules else options["output"], forms)
            _check_outputs(options)
            return command(*arguments, **options)

        return cast(Command, add_format(add_output(force_option(checked))))

    return decorate


def format_option(kind: str | None = None) -> Callable[[Command], Command]:
    """Add ``--format`` with the formats of a kind of document, or with text and JSON."""
    forms = formats_of(kind) if kind is not None else ("text", "json")
    return click.option(
        "--format",
        "form",
        type=click.Choice(forms, case_sensitive=False),
        default="text",
        show_default=True,
        help="Output format.",
    )


def _check_outputs(options: dict[str, Any]) -> None:
    """Check all output paths before the work begins.

    Raises:
        UsageError, OutputError: Two outputs have one path, or a file cannot be written.
    """
    from ampaudit.core.files import check_writable

    output, plot, policy, tuned, folder = map(
        options.get, ("output", "plot", "advise_policy", "tuned_policy", "tensorboard")
    )
    for path in filter(None, (output, plot, policy, tuned)):
        check_writable(path, force=options["force"])
    if plot is not None:
        from ampaudit.views.training_plot import check_picture

        check_picture(plot)
    for flag, path in (("--plot", plot), ("--advise-policy", policy), ("--policy-file", tuned)):
        if output is not None and path is not None and path.resolve() == output.resolve():
            raise UsageError(f"{flag} {describe(path)}: the report has this path", hint="name another file")
    if folder is not None:
        from ampaudit.training.tensorboard import check_summaries

        check_summaries(folder, force=options["force"])


def plot_option(what: str) -> Callable[[Command], Command]:
    """Add ``--plot``."""
    return file_option("--plot", metavar="FILE", help=f"Draw {what}: .png, .svg or .pdf.")


def verbose_option(text: str) -> Callable[[Command], Command]:
    """Add ``--verbose``."""
    return click.option("-v", "--verbose", is_flag=True, help=text)


def config_options(*records: type[Config], leave_out: Collection[str] = ()) -> Callable[[Command], Command]:
    """Add an option for each field of the records; a field in several records becomes one option."""
    options: dict[str, Callable[[Any], Any]] = {}
    for record in records:
        for name, field in record.model_fields.items():
            option = option_of(field)
            if option is not None and option.command_line and name not in leave_out:
                options.setdefault(name, _option(name, field, option))

    def decorate(command: Command) -> Command:
        for add in reversed(options.values()):
            command = add(command)
        return command

    return decorate


def config_from(record: type[Record], options: dict[str, Any], **more: Any) -> Record:
    """Build a record from the options of a command.

    Raises:
        UsageError: A value is invalid.
    """
    values = {n: value for n, value in options.items() if n in record.model_fields and value is not None}
    return record.read(values | more, COMMAND_LINE)


def explicit_options(options: dict[str, Any]) -> dict[str, Any]:
    """Return the options that are set on the command line."""
    source = click.get_current_context().get_parameter_source
    return {name: value for name, value in options.items() if source(name) is ParameterSource.COMMANDLINE}


def _option(name: str, field: FieldInfo, option: Option) -> Callable[[Command], Command]:
    flags = list(dict.fromkeys([*option.flags, long_flag(name, field)]))
    kind, default = value_type(field), field.default
    if kind is bool:
        if default:  # the flag switches off; what flag_value=False does depends on click's version
            return click.option(
                *flags, name, is_flag=True, callback=lambda _, parameter, value: not value, help=option.help
            )
        is_flag = None if "/" in flags[0] else True
        return click.option(*flags, name, is_flag=is_flag, default=False, help=option.help)
    if kind is Path:
        return file_option(*flags, name, metavar=option.metavar, help=option.help)
    if option.commas:
        default = ",".join(map(str, default)) or None
    several = get_origin(kind) is not None and get_origin(kind) is not Literal and not option.commas
    return click.option(
        *flags,
        name,
        type=_type(kind, field),
        multiple=several,
        default=default,
        show_default=default is not None and default not in ((), ""),
        metavar=option.metavar,
        help=option.help,
    )


def _type(kind: Any, field: FieldInfo) -> Any:
    if get_origin(kind) is Literal:
        return click.Choice(get_args(kind))
    low, high, is_open = limits_of(field)
    if kind in (int, float) and (low is not None or high is not None):
        return (click.IntRange if kind is int else click.FloatRange)(low, high, min_open=is_open)
    return kind if kind in (int, float) else str


def among_ranks(*, pipeline: bool = False) -> AbstractContextManager[RankShare | None]:
    """Enter the process group of torchrun, if there is one; all ranks end with the exit code of the first.

    With ``pipeline``, the ranks divide the model instead of the batches.
    """
    if rank_and_world_size() is None:
        if pipeline and "RANK" not in os.environ:
            raise click.UsageError("--pipeline divides the model among ranks: start it with torchrun")
        return nullcontext()
    from ampaudit.parallel.ranks import PipelineShare, RankShare, with_ranks

    return with_ranks(PipelineShare if pipeline else RankShare)
