"""The base of configuration records: frozen, validated, and documented field by field."""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Annotated, Any, Literal, Self, TypeVar, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le
from pydantic import AfterValidator, BaseModel, BeforeValidator, ConfigDict, ValidationError, model_validator
from pydantic.fields import FieldInfo

from ampaudit.core.errors import UsageError, did_you_mean
from ampaudit.core.formats import low_precision_format, name_of_dtype
from ampaudit.core.untrusted import describe

Function = TypeVar("Function", bound=Callable[..., Any])

UserFunction = Callable[..., Any]
_MAX_SEED = 2**62  # torch takes 64 bits, and batches count on from the seed
_DEVICE = re.compile(r"auto|cpu|mps|(cuda|xpu)(:\d{1,4})?", re.ASCII)
COMMAND_LINE = "--"  # how values are named in errors: as options


@dataclass(frozen=True, slots=True)
class Option:
    """The description of a record's field, and where it can be set."""

    help: str  # for the help text and the documentation
    metavar: str | None = None  # placeholder of the value in the help text
    flags: tuple[str, ...] = ()  # on the command line; a long one replaces ``--field-name``
    command_line: bool = True  # whether it is an option of the command
    file: bool = True  # whether it is a key of the command's table in pyproject.toml
    commas: bool = False  # whether several values are one text, separated by commas
    accepts: str = ""  # types that a caller may pass, as source code, if the field converts them


def python_only(text: str) -> Option:
    """Describe a field that can only be set from Python."""
    return Option(text, command_line=False, file=False)


def split_commas(value: Any) -> Any:
    """Split text at commas; return other values unchanged."""
    return [part.strip() for part in value.split(",") if part.strip()] if isinstance(value, str) else value


def _refuse_nan(value: float | None) -> float | None:
    if value is not None and math.isnan(value):
        raise ValueError
    return value


def _known_device(name: str) -> str:
    if not _DEVICE.fullmatch(name):
        hint = "one of: auto, cpu, cuda, mps, xpu; or one of several, such as cuda:1"
        raise UsageError(f"--device {describe(name)}: unknown device", hint=hint)
    return name


def _valid_seed(seed: int) -> int:
    if abs(seed) >= _MAX_SEED:
        raise UsageError(f"--seed {seed} is too large", hint="give a number below 2^62")
    return seed


Texts = Annotated[Sequence[str], AfterValidator(tuple)]
FilePath = Annotated[Path, BeforeValidator(lambda value: Path(value) if isinstance(value, str) else value)]
NOT_NAN = AfterValidator(_refuse_nan)
DtypeName = Annotated[
    str,
    BeforeValidator(name_of_dtype),
    AfterValidator(lambda name: low_precision_format(name).name),
    Option("16-bit format: float16 or bfloat16.", accepts="str | torch.dtype"),
]
DeviceName = Annotated[
    str,
    AfterValidator(_known_device),
    Option("Device to run on: cpu, cuda, cuda:1, xpu; for train and bench also mps.", metavar="DEVICE"),
]

Seed = Annotated[int, AfterValidator(_valid_seed), Option("Random seed.")]
# cannot be set in pyproject.toml, whose author may also have written the model
Trust = Annotated[bool, Option("Run code that the model's files contain.", file=False)]


class Config(BaseModel):
    """The options of one command."""

    model_config = ConfigDict(
        frozen=True, strict=True, extra="forbid", arbitrary_types_allowed=True, validate_default=False
    )

    @model_validator(mode="wrap")
    @classmethod
    def _one_clear_line(cls, values: Any, handler: Any, info: Any) -> Self:
        try:
            record: Self = handler(values)
        except ValidationError as error:
            first = error.errors()[0]
            name = str(first["loc"][0])
            raise _usage_error(cls, name, values.get(name), first["type"], info.context or "") from None
        return record

    @classmethod
    def read(cls, values: Mapping[str, Any], place: str = "") -> Self:
        """Validate values by field name that come from the command line or a file.

        Errors name the ``place``: ``COMMAND_LINE``, or a file and its table.

        Raises:
            UsageError: A value does not fit, or a name is unknown.
        """
        return cls.model_validate(dict(values), context=place)

    @classmethod
    def of(cls, other: Config, **values: Any) -> Self:
        """Return a record with the matching fields of another record and these values."""
        shared = cls.model_fields.keys() & type(other).model_fields.keys()
        return cls(**{name: getattr(other, name) for name in shared} | values)

    @classmethod
    def merged(cls, config: Self | None, options: Mapping[str, Any]) -> Self:
        """Return the record for a call: keyword options override the fields of ``config``.

        Raises:
            UsageError: An option does not fit, or the record is another command's.
        """
        if config is not None and not isinstance(config, cls):
            raise UsageError(f"config is of type {type(config).__name__}", hint=f"pass a {cls.__name__}")
        return cls(**options) if config is None else config.changed(**options)

    def check(self) -> None:
        """Check early what would otherwise fail only after the model is loaded.

        Raises:
            UsageError: An option does not fit this machine or another option.
        """

    def __repr_args__(self) -> Iterable[tuple[str | None, Any]]:
        fields = type(self).model_fields
        return ((name, value) for name, value in self if value != fields[name].default)

    def changed(self, **values: Any) -> Self:
        """Return a copy with other values; fields that were not set stay unset."""
        set_values = {name: getattr(self, name) for name in self.model_fields_set}
        return type(self)(**set_values | values)


def with_options(config: type[Config]) -> Callable[[Function], Function]:
    """Show the options of a record in the signature and the documentation of a function that takes them.

    Type checkers and editors read the same signatures in ``ampaudit/__init__.pyi``, which
    ``make stub`` writes.
    """

    def decorate(function: Function) -> Function:
        signature = inspect.signature(function)
        options = signature_with_options(signature, config)
        function.__signature__ = options  # type: ignore[attr-defined]
        names = [name for name in config.model_fields if name not in signature.parameters]
        described = [(name, option_of(config.model_fields[name])) for name in names]
        lines = (f"        {name}: {option.help}\n" for name, option in described if option is not None)
        doc = re.sub(r"\n +\*\*options: .*", "", function.__doc__ or "")  # no longer in the signature
        record = f"        Fields of ``{config.__name__}``, which override those of ``config``.\n\n"
        function.__doc__ = f"{doc}\n    Options:\n{record}{''.join(lines)}"
        return function

    return decorate


def signature_with_options(signature: inspect.Signature, config: type[Config]) -> inspect.Signature:
    """Replace ``**options`` in a signature by the fields of a record that the signature does not name."""
    others = [p for p in signature.parameters.values() if p.kind is not inspect.Parameter.VAR_KEYWORD]
    options = [
        inspect.Parameter(
            name,
            inspect.Parameter.KEYWORD_ONLY,
            default=field.get_default(call_default_factory=True, validated_data={}),
            annotation=_accepted_types(field),
        )
        for name, field in config.model_fields.items()
        if name not in signature.parameters
    ]
    return signature.replace(parameters=[*others, *options])


def _accepted_types(field: FieldInfo) -> str:
    """Return the types that a caller may pass for a field, as source code."""
    option = option_of(field)
    return option.accepts if option is not None and option.accepts else _type_text(field.annotation)


def option_of(field: FieldInfo) -> Option | None:
    """Return the description of a field; its own overrides that of its type."""
    return next((item for item in reversed(field.metadata) if isinstance(item, Option)), None)


def long_flag(name: str, field: FieldInfo) -> str:
    """Return the name of a field on the command line, such as ``--min-sqnr`` or ``--train/--eval``."""
    option = option_of(field)
    flags = option.flags if option is not None else ()
    return next((flag for flag in flags if flag.startswith("--")), f"--{name.replace('_', '-')}")


def value_type(field: FieldInfo) -> Any:
    """Return the type of a field's values, without ``None`` and Python-only types."""
    kinds = _value_types(field.annotation)
    return str if str in kinds else kinds[0]


def _value_types(annotation: Any) -> list[Any]:
    if get_origin(annotation) is Annotated:
        annotation = get_args(annotation)[0]
    if get_origin(annotation) in (Union, UnionType):
        return [kind for part in get_args(annotation) for kind in _value_types(part)]
    return [] if annotation is type(None) else [annotation]


def _type_text(kind: Any) -> str:
    origin, parts = get_origin(kind), get_args(kind)
    if origin is Annotated:
        return _type_text(parts[0])
    if origin in (Union, UnionType):
        return " | ".join(dict.fromkeys(" | ".join(map(_type_text, parts)).split(" | ")))
    if origin is Literal:
        return f"Literal[{', '.join(map(repr, parts))}]"
    if Callable in (kind, origin):
        return "Callable[..., Any]"
    if kind is Path:
        return "str | Path"
    if kind in (Any, type(None)):
        return "Any" if kind is Any else "None"
    return f"{kind.__name__}[{', '.join(map(_type_text, parts))}]" if parts else kind.__name__


def limits_of(field: FieldInfo) -> tuple[Any, Any, bool]:
    """Return the minimum and maximum of a number, and whether the minimum is excluded."""
    low = next((item for item in field.metadata if isinstance(item, Ge | Gt)), None)
    high = next((item.le for item in field.metadata if isinstance(item, Le)), None)
    return (low.ge if isinstance(low, Ge) else low and low.gt), high, isinstance(low, Gt)


def no_such(kind: str, name: str, place: str, known: Sequence[str]) -> UsageError:
    """Return the error for an unknown name, which suggests the nearest known one."""
    hint = f"{did_you_mean(name, known)}known {kind}s: {', '.join(known)}"
    return UsageError(f"{place}{describe(name)}: no such {kind}", hint=hint)


def _usage_error(record: type[Config], name: str, value: Any, problem: str, place: str) -> UsageError:
    if problem == "extra_forbidden":
        return no_such("option", name, place, list(record.model_fields))
    field = record.model_fields[name]
    kinds = _value_types(field.annotation)
    hint = f"it must be {_either(_in_words(kind, *limits_of(field)) for kind in kinds)}"
    if float in kinds and isinstance(value, float) and not math.isfinite(value):
        hint += f"; {describe(value)} is not a valid limit"
    if place == COMMAND_LINE:
        return UsageError(f"{long_flag(name, field)} {describe(value)}", hint=hint)
    shown = name.replace("_", "-") if place else name
    return UsageError(f"{place}{shown} = {describe(repr(value))}", hint=hint)


def _either(words: Iterable[str]) -> str:
    *first, last = words
    return f"{', '.join(first)} or {last}" if first else last


def _in_words(kind: Any, least: Any = None, most: Any = None, is_open: bool = False) -> str:
    """Describe the values of a type; numbers from the least to the largest one."""
    if get_origin(kind) is Literal:
        return _either(map(str, get_args(kind)))
    if get_origin(kind) is Sequence:
        return "a list of whole numbers" if get_args(kind) == (int,) else "a list of strings"
    if Callable in (kind, get_origin(kind)):
        return "a function"
    if kind not in (int, float):
        return {bool: "true or false", Path: "a path", str: "a string"}.get(kind, f"a {kind.__name__}")
    words = "a whole number" if kind is int else "a number"
    if least is None:
        return words
    if most is not None:
        return f"{words} from {least:g} to {most:g}"
    if is_open or (kind is int and least > 0):
        return f"{words} above {least if is_open else least - 1:g}"
    return f"{words}, {least:g} or more"


def path_argument(value: Any, what: str) -> Path:
    """Return an argument as a path.

    Raises:
        UsageError: The argument is missing, empty or not a path.
    """
    if not isinstance(value, str | Path) or value == "":
        problem = "missing" if value in (None, "") else f"of type {type(value).__name__}"
        raise UsageError(f"{what} is {problem}", hint="pass a path")
    return Path(value)


def path_arguments(value: Any, what: str) -> list[str]:
    """Return an argument that is a path or an iterable of paths as a list.

    Raises:
        UsageError: The argument or one of its items is not a path.
    """
    several = [value] if isinstance(value, str | Path) else value
    if not isinstance(several, Iterable) or isinstance(several, Mapping):
        raise UsageError(f"{what} is of type {type(value).__name__}", hint="pass a path or a list of paths")
    return [str(path_argument(item, what)) for item in several]
