"""Loads a Hugging Face model directory: config.json and safetensors, without network or remote code."""

from __future__ import annotations

import contextlib
import hashlib
import importlib.util
import json
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from annotated_types import Ge, Le
from pydantic import TypeAdapter
from safetensors.torch import save_file
from torch import nn
from typing_extensions import TypedDict

from ampaudit.checkpoint import FLOAT_TYPES
from ampaudit.checkpoint.open import Checkpoint
from ampaudit.core.errors import AuditError, InputError, SourceError, first_line
from ampaudit.core.files import temporary_directory
from ampaudit.core.sandbox import Sandbox, SandboxLimits
from ampaudit.core.source_config import (
    CONFIG_FILE,
    REHEARSAL,
    REHEARSAL_ENVIRONMENT,
    REHEARSAL_IMPORTS,
    SourceConfig,
)
from ampaudit.core.text import format_bytes, listed
from ampaudit.core.untrusted import MAX_MESSAGE, describe, describe_path, read_bounded, validate
from ampaudit.report.model import GIVEN, InputsInfo
from ampaudit.source.generated_inputs import (
    GeneratedInputs,
    InputRequest,
    check_ids,
    generate_inputs,
    read_inputs,
    resize_batches,
)
from ampaudit.source.inputs import functions_of, inputs_from
from ampaudit.source.interface import BatchFactory, ModelSource
from ampaudit.source.model_config import MAX_CONFIG, read_model_config, read_raw_config
from ampaudit.source.processor import KINDS, copy_processor, has_processor, placeholders, processor_directory
from ampaudit.source.streamed import notes_on, open_weights, tensors_of
from ampaudit.source.user_code import calling_user_code
from ampaudit.trace.internals import Replacement, patched

INPUTS_FILE = "inputs.safetensors"
_SHOWN = 3
_MAX_INPUTS = 200_000_000  # bytes; below the sandbox's limit for a file
_SLACK = 256_000_000  # bytes for a head without weights, or for tables that the model computes
_LIMITS = SandboxLimits(seconds=120, memory=500_000_000, processor_seconds=5)
_Loaded = tuple[nn.Module, GeneratedInputs | None, tuple[str, ...]]  # model, inputs, notes on the weights
_PROCESSING_LIMITS = SandboxLimits(seconds=120, memory=2_000_000_000, processor_seconds=30)


class RehearsalResult(TypedDict):
    """What building a model without weights in the sandbox reveals about it."""

    name: str  # of the model class
    size: Annotated[int, Ge(0), Le(1 << 80)]  # bytes in float32
    origin: Literal["", "file", "sample", "random"]  # of the inputs; empty if there are none
    detail: str  # describes the inputs, or why they could not be generated
    hint: str  # for the user, if they could not


_ANSWER = TypeAdapter(RehearsalResult)


def rehearse(request: dict[str, Any]) -> Callable[[], RehearsalResult]:
    """Return the sandbox's job: to build the model without weights, and write inputs to its folder.

    The request has ``table``, a configuration; ``directory``, with the processor's files; and ``inputs``, an
    ``InputRequest`` or ``None``.
    """
    table, inputs = request["table"], request["inputs"]
    architecture = named_architecture(table)

    def work() -> RehearsalResult:
        config = build_config(architecture, table, Path.cwd())
        with torch.device("meta"):
            model = empty_model(architecture, config)
        tensors = {id(t): t for t in (*model.parameters(), *model.buffers())}.values()
        size = sum(t.numel() * (4 if t.is_floating_point() else t.itemsize) for t in tensors)
        answer = RehearsalResult(name=type(model).__name__, size=size, origin="", detail="", hint="")
        if inputs is not None:
            try:
                prepared = _saved_inputs(model, inputs, Path(request["directory"]))
                answer["origin"], answer["detail"] = prepared["origin"], prepared["detail"]
            except AuditError as error:
                answer["detail"], answer["hint"] = str(error.args[0]), error.hint
        return answer

    return work


def _saved_inputs(model: Any, request: InputRequest, directory: Path) -> GeneratedInputs:
    copy_processor(directory, Path.cwd())
    inputs = generate_inputs(model, request, Path.cwd())
    tensors = {f"{i}.{name}": t for i, batch in enumerate(inputs["batches"]) for name, t in batch.items()}
    size = sum(tensor.nbytes for tensor in tensors.values())
    if size > _MAX_INPUTS:
        raise InputError(f"inputs of {format_bytes(size)} are too large", hint="lower --batches")
    save_file({name: tensor.contiguous().clone() for name, tensor in tensors.items()}, INPUTS_FILE)
    return inputs


def named_architecture(table: dict[str, Any]) -> Any:
    """Return the model class that a configuration names, or ``AutoModel``.

    Raises:
        SourceError: This version of Transformers lacks the model.
    """
    import transformers

    architecture, names = named_class(table), table.get("architectures") or []
    if architecture is None and names:
        raise SourceError(
            f"architecture {names[0]!r} is not in this version of transformers",
            hint="update transformers; code that ships with a model directory runs only with --trust",
        )
    return architecture or transformers.AutoModel


def named_class(table: dict[str, Any]) -> Any:
    """Return the first Transformers model class named by a configuration, or ``None``."""
    import transformers

    for name in table.get("architectures") or []:
        candidate = getattr(transformers, str(name), None)
        base = transformers.PreTrainedModel
        if isinstance(candidate, type) and issubclass(candidate, base) and candidate is not base:
            return candidate
    return None


def build_config(architecture: Any, table: dict[str, Any], folder: Path) -> Any:
    """Build a configuration from a table of ``read_model_config``, through a file in an empty folder."""
    import transformers

    (folder / CONFIG_FILE).write_text(json.dumps(table), encoding="utf-8")
    kind = getattr(architecture, "config_class", None) or transformers.AutoConfig
    return kind.from_pretrained(folder, local_files_only=True, trust_remote_code=False)


def empty_model(architecture: Any, config: Any, *, trust: bool = False) -> nn.Module:
    """Build a model with uninitialized weights, on the current default device."""
    if hasattr(architecture, "from_config"):
        model = architecture.from_config(config, dtype=torch.float32, trust_remote_code=trust)
    else:
        model = architecture._from_config(config, dtype=torch.float32)
    assert isinstance(model, nn.Module)
    return model


def from_directory(path: Path, options: SourceConfig, location: str) -> ModelSource:
    """Load the model of a directory in FP32, with inputs from --inputs or its processor.

    Raises:
        SourceError: Transformers is not installed, or the directory holds no loadable model.
        InputError: The kind of input is unknown; pass --inputs.
        WeightsError: See ``open_checkpoint``.
    """
    model, inputs, notes = _load_trusted(path, options) if options.trust else _load_untrusted(path, options)
    functions, info = functions_of(), GIVEN
    kind = type(model)
    if kind.__module__.startswith("transformers.") and _auto_map(read_raw_config(path)):
        notes += (
            f"this is {kind.__name__} of Transformers, not the code that auto_map in config.json names",
        )
    if inputs is not None:
        check_ids(model, inputs["batches"])
        make_batches: BatchFactory = partial(resize_batches, inputs["batches"], placeholders(model.config))
        info = InputsInfo(inputs["origin"], inputs["detail"])
    else:
        make_batches, functions, info = inputs_from(options, model)
    digest = hashlib.sha256(read_bounded(path / CONFIG_FILE, MAX_CONFIG, SourceError)).hexdigest()
    batches = make_batches(options.input_sizes or {})
    return ModelSource(
        location,
        "huggingface",
        model,
        batches,
        digest,
        inputs=info,
        make_batches=make_batches,
        notes=notes,
        **functions,
    )


def _request(options: SourceConfig) -> InputRequest | None:
    """Return the request for generated inputs, or ``None`` with --inputs."""
    if options.inputs is not None:
        return None
    files = {kind: getattr(options, kind) for kind in KINDS}
    paths = {kind: str(file.resolve()) for kind, file in files.items() if file is not None}
    return InputRequest(files=paths, batches=options.batches, seed=options.seed)


def _load_untrusted(path: Path, options: SourceConfig) -> _Loaded:
    """Build the model from a checked configuration, after a rehearsal in a sandbox, and load its weights.

    Transformers never sees the directory itself.
    """
    table = read_model_config(path)
    _check_installed()
    processor = processor_directory(path.resolve())
    request = {"table": table, "directory": str(processor), "inputs": _request(options)}
    limits, hint = _LIMITS, "restore the file"
    if request["inputs"] is not None and (has_processor(processor) or "text_config" in table):
        limits, hint = _PROCESSING_LIMITS, f"{hint}, or pass --inputs FILE.py with example_inputs()"
    with Sandbox(REHEARSAL, request, limits, REHEARSAL_ENVIRONMENT, REHEARSAL_IMPORTS) as sandbox:
        transformers = _transformers()
        named_class(table)  # import it while the sandbox does the same
        what = describe_path(path / CONFIG_FILE)
        answer = sandbox.answer(what, SourceError, hint)
        rehearsed = validate(_ANSWER, answer, path / CONFIG_FILE, SourceError, "restore the file")
        inputs = None if request["inputs"] is None else _inputs_from(rehearsed, sandbox.folder / INPUTS_FILE)
    weights = open_weights(path, options.weights if options.stream else None)
    _check_size(path, rehearsed["size"], weights)
    table["architectures"] = [rehearsed["name"]]
    architecture = named_architecture(table)
    from huggingface_hub import constants

    offline = patched((Replacement(constants, "HF_HUB_OFFLINE", True),))  # as in the sandbox
    with _loading(path), offline, temporary_directory("ampaudit-config-") as folder:
        config = build_config(architecture, table, folder)
        if options.stream:
            return empty_model(architecture, config).eval(), inputs, ()
        # of the base class, because some classes override it to read further files
        load = transformers.PreTrainedModel.from_pretrained.__func__
        options_of_load = {"config": config, "dtype": torch.float32, "output_loading_info": True}
        loaded = load(architecture, None, state_dict=tensors_of(weights), **options_of_load)
    model, notes = _checked(loaded, options)
    return model, inputs, (*notes_on(weights), *notes)


def _checked(loaded: Any, options: SourceConfig) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a model that Transformers has loaded, and notes on tensors that it or its files lack."""
    model, info = loaded
    assert isinstance(model, nn.Module)
    if options.weights is not None:
        return model, ()
    missing = [name for name in model.state_dict() if name in info["missing_keys"]]
    notes = {
        "random values, as the weight files lack them": missing,
        "not used, as config.json describes no such weights": sorted(info["unexpected_keys"]),
    }
    return model, tuple(
        f"{what}: {listed([describe(name) for name in names], _SHOWN)}"
        for what, names in notes.items()
        if names
    )


def _inputs_from(answer: RehearsalResult, file: Path) -> GeneratedInputs:
    if not answer["origin"]:
        raise InputError(describe(answer["detail"], MAX_MESSAGE), hint=describe(answer["hint"], MAX_MESSAGE))
    return GeneratedInputs(batches=read_inputs(file), origin=answer["origin"], detail=answer["detail"])


def _check_size(path: Path, size: int, weights: Checkpoint) -> None:
    """Reject a configuration whose model is much larger than the stored weights."""
    stored = sum(4 * entry.elements for entry in weights.entries.values() if entry.dtype in FLOAT_TYPES)
    if size > 2 * stored + _SLACK:
        raise SourceError(
            f"{describe_path(path / CONFIG_FILE)}: describes a model of {format_bytes(size)}; "
            f"its weights are {format_bytes(stored)} in float32",
            hint="give the directory of one model, with all of its weights",
        )


def _load_trusted(path: Path, options: SourceConfig) -> _Loaded:
    """Load the model with Transformers, including code in the directory."""
    table = read_raw_config(path)
    _check_installed()
    transformers = _transformers()
    print(f"ampaudit: --trust: transformers may run code of {describe_path(path)}", file=sys.stderr)
    notes: tuple[str, ...] = ()
    with calling_user_code(f"{path}"):
        architecture = _auto_class(table, transformers) or named_class(table) or transformers.AutoModel
        local = {"local_files_only": True, "trust_remote_code": True}
        if options.stream:
            config = transformers.AutoConfig.from_pretrained(path, **local)
            model = empty_model(architecture, config, trust=True).eval()
        else:
            local |= {"use_safetensors": True, "output_loading_info": True}
            model, notes = _checked(architecture.from_pretrained(path, dtype=torch.float32, **local), options)
        request = _request(options)
        inputs = None if request is None else generate_inputs(model, request, path, trust=True)
    return model, inputs, notes


def _auto_map(table: dict[str, Any]) -> dict[str, Any]:
    """Return the auto classes that load the directory's own code, each with the class that it loads."""
    auto_map = table.get("auto_map")
    entries = auto_map.items() if isinstance(auto_map, dict) else ()
    return {name: code for name, code in entries if name.startswith("AutoModel")}


def _auto_class(table: dict[str, Any], transformers: Any) -> Any:
    """Return the auto class that loads the directory's own code; ``None`` if it has none."""
    auto_map, classes = _auto_map(table), table.get("architectures") or [""]
    loaders = [name for name in auto_map if hasattr(transformers, name)]
    loaders.sort(key=lambda name: not str(auto_map[name]).endswith(f".{classes[0]}"))
    return getattr(transformers, loaders[0]) if loaders else None


def _check_installed() -> None:
    if importlib.util.find_spec("transformers") is None:
        raise SourceError(
            "Hugging Face directories need the transformers package",
            hint="pip install 'ampaudit[transformers]'",
        )


def _transformers() -> Any:
    import transformers

    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    return transformers


@contextlib.contextmanager
def _loading(path: Path) -> Iterator[None]:
    """Report exceptions of Transformers as errors in the directory."""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    except AuditError:
        raise
    except Exception as error:
        what = f"Transformers cannot load it: {type(error).__name__}: {describe(first_line(error), 120)}"
        if "ignore_mismatched_sizes" in str(error):
            what = f"the weights have other shapes than {CONFIG_FILE} describes"
        hint = "restore the directory: configuration and weights must be of one model"
        raise SourceError(f"{describe_path(path)}: {what}", hint=hint) from error
