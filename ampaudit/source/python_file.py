"""Loads models from Python: ``file.py``, ``file.py:factory`` and ``package.module:factory``."""

from __future__ import annotations

import ast
import hashlib
import inspect
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import Signature
from itertools import islice
from pathlib import Path
from types import ModuleType
from typing import Any

import torch
from torch import nn

from ampaudit.core.errors import SourceError, UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.core.text import format_number
from ampaudit.core.untrusted import describe
from ampaudit.report.model import GIVEN, InputsInfo
from ampaudit.source.inputs import batches_of, functions_of, inputs_from
from ampaudit.source.interface import INPUT_SEED_OFFSET, Batch, BatchFactory, ModelSource
from ampaudit.source.unwrapping import auditable, overrides_lightning, runnable
from ampaudit.source.user_code import calling_user_code, import_module_named, module_from_file
from ampaudit.trace.values import dtype_name

_HINT = "write SIZES, NAME=SIZES or NAME=SIZES:DTYPE@RANGE, such as 8x3x32x32 or ids=2x77:int64@49408"
_SIZES = re.compile(r"[0-9]{1,9}(x[0-9]{1,9})*", re.ASCII)
_MAX_BYTES = 1 << 33
_NAMES = "bool uint8 int8 int16 int32 int64 float16 bfloat16 float32 float64".split()
_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _NAMES}


def from_python(target: Path | str, factory: str | None, options: SourceConfig, location: str) -> ModelSource:
    """Load the model of a Python file, or of a module by its dotted name.

    Raises:
        SourceError: The file or module is missing, defines no model, or raises.
        InputError: It defines no inputs.
    """
    torch.manual_seed(options.seed)
    if isinstance(target, Path):
        module = module_from_file(target, factory or "get_model")
    else:
        module = import_module_named(target)
    file = getattr(module, "__file__", None)
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
    model = _model(module, factory, options.args, location)
    model = runnable(auditable(model), location)
    functions, info = functions_of(module), GIVEN
    make_batches: BatchFactory | None = None
    if options.input:
        batches, info = described_batches(options.input, options.batches or 1, options.seed)
    elif options.inputs is not None:
        make_batches, functions, info = inputs_from(options, model, module)
        batches = make_batches(options.input_sizes or {})
    elif any(callable(getattr(module, name, None)) for name in ("batches", "example_inputs")):
        make_batches = partial(batches_of, module, options.batches or 1, options.seed)
        batches = make_batches(options.input_sizes or {})
    else:
        batches, info = (), InputsInfo("given", "batches of train_dataloader()")
        if overrides_lightning(model, "train_dataloader"):
            torch.manual_seed(options.seed + INPUT_SEED_OFFSET)
            load: Any = model.train_dataloader
            with calling_user_code(f"{location}: train_dataloader()"):
                batches = tuple(Batch((batch,)) for batch in islice(load(), options.batches or 1))
        if not batches:
            raise SourceError(
                f"{location} has no example_inputs()",
                hint="add example_inputs() to the file, or pass sizes, such as --input 8x3x32x32",
            )
    kind = "python" if isinstance(target, Path) else "import"
    return ModelSource(
        location, kind, model, batches, digest, inputs=info, make_batches=make_batches, **functions
    )


def _model(module: ModuleType, factory: str | None, arguments: str, location: str) -> nn.Module:
    args, kwargs = _literals(arguments)
    target = getattr(module, factory or "get_model", None)
    if target is None and factory is None:
        target = _only_module_class(module, location, any_arguments=bool(arguments))
    if target is None:
        raise SourceError(f"{location}: {factory!r} is not defined", hint="check the name after the colon")
    name = factory or getattr(target, "__name__", "get_model")
    if isinstance(target, nn.Module):
        if arguments:
            raise SourceError(f"{location}: {name} is a model already, and takes no --args")
        return target
    if not callable(target):
        raise SourceError(f"{location}: {name} is not callable")
    _check_arguments(target, args, kwargs, f"{location}: {name}")
    with calling_user_code(f"{location}: {name}({arguments})"):
        model = target(*args, **kwargs)
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"{location}: {name}({arguments}) returned {type(model).__name__}, not an nn.Module",
            hint="return the module; for a state_dict, build the module and pass the file with --weights",
        )
    return model


def _literals(text: str) -> tuple[list[Any], dict[str, Any]]:
    """Parse Python call arguments that are numbers, strings, or containers of these."""
    try:
        call = ast.parse(f"f({text})", mode="eval").body
        if not isinstance(call, ast.Call) or not isinstance(call.func, ast.Name):
            raise ValueError(text)
        keywords = {word.arg: ast.literal_eval(word.value) for word in call.keywords if word.arg}
        if len(keywords) < len(call.keywords):  # one is repeated, or unpacked by **
            raise ValueError(text)
        return [ast.literal_eval(argument) for argument in call.args], keywords
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        hint = "write numbers, quoted strings and lists: --args \"3, 'gelu', width=64\""
        raise UsageError(f"--args {describe(text)}: cannot be read", hint=hint) from None


def _check_arguments(target: Callable[..., Any], args: list[Any], kwargs: dict[str, Any], what: str) -> None:
    """Reject arguments that do not fit the signature of a class or factory."""
    try:
        signature = inspect.signature(target)
    except (TypeError, ValueError):
        return  # written in C
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        hint = (
            f"pass its arguments with --args; it takes {signature.replace(return_annotation=Signature.empty)}"
        )
        raise SourceError(f"{what}: {error}", hint=hint) from None


def _only_module_class(module: ModuleType, location: str, *, any_arguments: bool) -> type[nn.Module]:
    """Return the only nn.Module class of the file.

    Unless ``any_arguments`` may be passed, classes with required arguments do not count.
    """
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    ]
    free = [c for c in classes if any_arguments or not _required_parameters(c)]
    if len(free) == 1:
        return free[0]
    names = ", ".join(c.__name__ for c in free)
    instances = [name for name, value in vars(module).items() if isinstance(value, nn.Module)]
    if not classes:
        what = "defines no get_model() and no nn.Module class"
    elif free:
        what = f"defines several models ({names})"
    else:
        needs = "; ".join(f"{c.__name__} needs {', '.join(_required_parameters(c))}" for c in classes)
        what = f"defines no model that can be built without arguments ({needs})"
    # the last one usually contains the others
    last = instances[-1] if instances else (free or classes or [nn.Module])[-1].__name__
    hint = f"add: def get_model(): return {last}(...)"
    if instances:
        hint = f"add: def get_model(): return {last}, or scan it by its name: {location}:{last}"
    elif classes:
        hint += f", or scan it with its arguments: {location}:{last} --args ..."
    raise SourceError(f"{location} {what}", hint=hint)


def _required_parameters(cls: type[nn.Module]) -> list[str]:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    return [
        p.name for p in parameters if p.default is p.empty and p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)
    ]


@dataclass(frozen=True, slots=True)
class InputDescription:
    """The name, sizes, dtype and range of an input, from ``--input``."""

    name: str  # of the argument; empty for the next positional one
    sizes: tuple[int, ...]
    dtype: torch.dtype
    low: float | None = None  # None for normally distributed floats and for booleans
    high: float | None = None  # exclusive for integers

    def sample(self) -> torch.Tensor:
        """Return a random tensor."""
        if self.dtype is torch.bool:
            return torch.rand(self.sizes) < 0.5
        if self.low is None or self.high is None:
            return torch.randn(self.sizes, dtype=self.dtype)
        if not self.dtype.is_floating_point:
            return torch.randint(int(self.low), int(self.high), self.sizes, dtype=self.dtype)
        uniform = torch.rand(self.sizes, dtype=torch.float64) * (self.high - self.low) + self.low
        return uniform.to(self.dtype)

    def in_words(self, number: int) -> str:
        """Describe the name, sizes and values for a report."""
        dtype = dtype_name(self.dtype)
        values = "normally distributed" if self.dtype is not torch.bool else "true or false"
        if self.low is not None and self.high is not None:
            values = f"{format_number(self.low)} to {format_number(self.high)}"
            if not self.dtype.is_floating_point:
                values = f"{self.low:,} to {self.high - 1:,}"
        return f"{self.name or f'input[{number}]'} {'x'.join(map(str, self.sizes))} {dtype}, {values}"


def described_batches(texts: Sequence[str], count: int, seed: int) -> tuple[tuple[Batch, ...], InputsInfo]:
    """Return random batches of the inputs that ``--input`` describes, and a description for a report.

    Raises:
        UsageError: A description cannot be read, or a name occurs twice.
    """
    described = [read_description(text) for text in texts]
    names = [each.name for each in described if each.name]
    if len(names) > len(set(names)):
        raise UsageError("--input: a name is given twice", hint="describe each input once")
    torch.manual_seed(seed + INPUT_SEED_OFFSET)
    batches = []
    for _ in range(count):
        tensors = [(each.name, each.sample()) for each in described]
        args = tuple(tensor for name, tensor in tensors if not name)
        batches.append(Batch(args, {name: tensor for name, tensor in tensors if name}))
    words = "; ".join(each.in_words(number) for number, each in enumerate(described))
    return tuple(batches), InputsInfo("random", words)


def read_description(text: str) -> InputDescription:
    """Parse ``[NAME=]SIZES[:DTYPE][@RANGE]``.

    Raises:
        UsageError: The text does not have this form.
    """
    name, equals, rest = text.rpartition("=")
    shape, ranged, span = rest.partition("@")
    sizes, _, dtype_name = shape.partition(":")
    dtype = _DTYPES.get(dtype_name or "float32")
    if (equals and not name.isidentifier()) or not _SIZES.fullmatch(sizes):
        raise _unreadable(text)
    if dtype is None:
        hint = f"one of: {', '.join(_NAMES)}"
        raise UsageError(f"--input {describe(text)}: unknown dtype {describe(dtype_name)}", hint=hint)
    dimensions = tuple(map(int, sizes.split("x")))
    if math.prod(dimensions) * dtype.itemsize > _MAX_BYTES:
        raise _unreadable(text, "more than 8 GB")
    if not ranged:
        if dtype is not torch.bool and not dtype.is_floating_point:
            hint = f"add one, such as {describe(text)}@1000 for 0 to 999"
            raise UsageError(f"--input {describe(text)}: integers need a range", hint=hint)
        return InputDescription(name, dimensions, dtype)
    return InputDescription(name, dimensions, dtype, *_range(text, span, dtype))


def _range(text: str, span: str, dtype: torch.dtype) -> tuple[float, float]:
    """Parse a range, ``LOW:HIGH`` or, for integers, ``COUNT``."""
    first, colon, second = span.partition(":")
    is_float = dtype.is_floating_point
    number = float if is_float else int
    if is_float and not colon:
        raise _unreadable(text, "the range of floats is LOW:HIGH")
    try:
        low, high = (number(first), number(second)) if colon else (0, int(first))
    except ValueError:
        raise _unreadable(text) from None
    if dtype is torch.bool:
        raise _unreadable(text, "booleans have no range")
    limits = torch.finfo(dtype) if is_float else torch.iinfo(dtype)
    if not limits.min <= low < high <= limits.max:
        raise _unreadable(text, "the range is empty, or ends beyond the dtype")
    return low, high


def _unreadable(text: str, why: str = "cannot be read") -> UsageError:
    return UsageError(f"--input {describe(text)}: {why}", hint=_HINT)
