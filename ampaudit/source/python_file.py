"""Loads models from Python: ``file.py``, ``file.py:factory`` and ``package.module:factory``."""

from __future__ import annotations

import hashlib
import inspect
from functools import partial
from pathlib import Path
from types import ModuleType

import torch
from torch import nn

from ampaudit.core.errors import SourceError
from ampaudit.core.source_config import SourceConfig
from ampaudit.report.inputs import InputsInfo
from ampaudit.source.inputs import batches_of, functions_of, has_inputs, inputs_from
from ampaudit.source.interface import INPUT_SEED_OFFSET, Batch, ModelSource
from ampaudit.source.training_step import runnable, training_batches
from ampaudit.source.unwrapping import auditable
from ampaudit.source.user_code import calling_user_code, import_module_named, module_from_file

__all__ = ["from_import_path", "from_python_file"]


def from_python_file(path: Path, factory: str | None, options: SourceConfig, location: str) -> ModelSource:
    """Load the model of a Python file.

    Raises:
        SourceError: no file, no model in it, or its code raises.
        InputError: it defines no inputs.
    """
    torch.manual_seed(options.seed)
    module = module_from_file(path)
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    return _source(module, factory, options, location, "python", digest)


def from_import_path(name: str, factory: str, options: SourceConfig, location: str) -> ModelSource:
    """Load the model of ``package.module:factory``, with inputs from that module or --inputs."""
    torch.manual_seed(options.seed)
    module = import_module_named(name)
    file = getattr(module, "__file__", None)
    digest = hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else None
    return _source(module, factory, options, location, "import", digest)


def _source(
    module: ModuleType,
    factory: str | None,
    options: SourceConfig,
    location: str,
    kind: str,
    digest: str | None,
) -> ModelSource:
    model = runnable(_model(module, factory, location), location)
    if options.inputs is not None:
        sized, functions, info = inputs_from(options, model, module)
        given = sized(options.input_sizes or {})
        return ModelSource(location, kind, model, given, digest, inputs=info, sized=sized, **functions)
    if not has_inputs(module):
        own = _own_batches(model, options, location)
        if own:
            info = InputsInfo("given", "batches of train_dataloader()")
            return ModelSource(location, kind, model, own, digest, inputs=info, **functions_of(module))
        raise SourceError(
            f"{location} has no example_inputs()",
            hint="add example_inputs() to the file, or pass --inputs FILE with a file that has it",
        )
    sized = partial(batches_of, module, options.batches or 1, options.seed)
    batches = sized(options.input_sizes or {})
    return ModelSource(location, kind, model, batches, digest, sized=sized, **functions_of(module))


def _own_batches(model: nn.Module, options: SourceConfig, location: str) -> tuple[Batch, ...]:
    """Return batches of a Lightning module's data loader; none if it has none."""
    torch.manual_seed(options.seed + INPUT_SEED_OFFSET)
    with calling_user_code(f"{location}: train_dataloader()"):
        return tuple(Batch((batch,)) for batch in training_batches(model, options.batches or 1))


def _model(module: ModuleType, factory: str | None, location: str) -> nn.Module:
    made = getattr(module, factory or "get_model", None)
    if made is None and factory is None:
        made = _only_module_class(module, location)
    if made is None:
        raise SourceError(f"{location}: {factory!r} is not defined", hint="check the name after the colon")
    if isinstance(made, nn.Module):
        return auditable(made)
    if not callable(made):
        raise SourceError(f"{location}: {factory or 'get_model'} is not callable")
    with calling_user_code(f"{location}: {factory or 'get_model'}()"):
        model = made()
    if not isinstance(model, nn.Module):
        raise SourceError(
            f"{location}: {factory or 'get_model'}() returned {type(model).__name__}, not an nn.Module",
            hint="return the module; for a state_dict, build the module and pass the file with --weights",
        )
    return auditable(model)


def _only_module_class(module: ModuleType, location: str) -> type[nn.Module]:
    """Return the only nn.Module subclass in the file with no required arguments."""
    classes = [
        value
        for value in vars(module).values()
        if inspect.isclass(value) and issubclass(value, nn.Module) and value.__module__ == module.__name__
    ]
    free = [c for c in classes if not _required_parameters(c)]
    if len(free) == 1:
        return free[0]
    names = ", ".join(c.__name__ for c in free)
    if not classes:
        what = "defines no get_model() and no nn.Module"
    elif free:
        what = f"defines several models ({names})"
    else:
        needs = "; ".join(f"{c.__name__} needs {', '.join(_required_parameters(c))}" for c in classes)
        what = f"defines no model that can be made without arguments ({needs})"
    name = (free or classes or [nn.Module])[0].__name__
    raise SourceError(
        f"{location} {what}",
        hint=f"add: def get_model(): return {name}(...), or name a factory with FILE.py:factory",
    )


def _required_parameters(cls: type[nn.Module]) -> list[str]:
    parameters = list(inspect.signature(cls.__init__).parameters.values())[1:]
    free_kinds = (inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD)
    return [p.name for p in parameters if p.default is p.empty and p.kind not in free_kinds]
