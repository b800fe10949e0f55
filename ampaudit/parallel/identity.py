"""Identifies what is audited, so that processes can check that they audit the same."""

from __future__ import annotations

import hashlib
import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.utils import _pytree as pytree

from ampaudit.audit.config import Rules, ScanConfig, rules_of
from ampaudit.core import __version__
from ampaudit.core.config import Config
from ampaudit.core.errors import UsageError
from ampaudit.run.share import Share
from ampaudit.source import ModelSource
from ampaudit.source.user_code import USER_MODULE_PREFIX
from ampaudit.trace.entry import tensor_leaves

_SAMPLES = 256  # elements of each tensor
_PLAIN = (bool, int, float, complex, str, bytes, torch.dtype, torch.device, type(None))
# options that are compared elsewhere or do not affect the records
_IGNORED_OPTIONS = {"policy", "device", "memory", "fail_on"}


class CommandShare(Share):
    """A share of a command's batches that knows the location and identity of what is audited."""

    about: tuple[str, Identity] | None = None

    def describe(self, location: str, identity: Identity) -> None:
        """Set what is audited."""
        self.about = location, identity


_UNDIVIDED = {
    "static": "nothing is run",
    "steps": "each step needs the one before it",
    "sweep": "each size is an audit of its own",
    "against": "the reference runs beside each batch",
}


@dataclass(frozen=True, slots=True)
class Identity:
    """Fingerprint of an audit: versions, and digests of what is audited."""

    version: str  # of ampaudit
    torch: str
    # its file, the files beside it that it imports, those of its loss, metric and twins, its modules with
    # modes, and a sample of weights
    model: str
    inputs: str  # a sample of all batches, and their values other than tensors
    batches: int  # number of batches
    policies: str  # the rules of all policies
    options: str

    def difference(self, other: Identity) -> str:
        """Describe how the other identity differs; empty if it is the same."""
        words = {
            "version": f"ampaudit {other.version} instead of {self.version}",
            "torch": f"PyTorch {other.torch} instead of {self.torch}",
            "batches": f"{other.batches} batches instead of {self.batches}",
            "model": "another model: other code, other files that it imports, another loss, other twins, "
            "other weights or another mode (--train)",
            "inputs": "other inputs",
            "policies": "another policy",
            "options": "other options",
        }
        return next((text for name, text in words.items() if getattr(self, name) != getattr(other, name)), "")


def identity_of(source: ModelSource, policies: Sequence[Rules], config: Config) -> Identity:
    """Return the identity of an audit.

    Weights and inputs are compared by a sample of their elements: enough to notice a model that was
    initialized with other random numbers on another machine.
    """
    model = source.model
    modules = [
        f"{name}: {type(module).__qualname__} {module.training}" for name, module in model.named_modules()
    ]
    weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    calls = [((*batch.args, batch.item), batch.kwargs) for batch in source.batches]
    inputs = (tensor for args, kwargs in calls for tensor in tensor_leaves(args, kwargs))
    plain = [
        repr(leaf) if isinstance(leaf, _PLAIN) else type(leaf).__qualname__
        for leaf in pytree.tree_leaves(calls)
        if not isinstance(leaf, torch.Tensor)
    ]
    code = source.sha256, imported_files(source), _other_code(source, config)
    options = config.model_dump(mode="python", exclude=_IGNORED_OPTIONS)
    rules = [rules_of(policy).file.model_dump(mode="json") for policy in policies]
    return Identity(
        __version__,
        torch.__version__,
        _digest(*code, modules, _sampled(weights)),
        _digest(_sampled({str(number): tensor for number, tensor in enumerate(inputs)}), plain),
        len(source.batches),
        _digest(rules),
        _digest(options),
    )


def imported_files(source: ModelSource) -> list[str]:
    """Return digests of the Python files that a model's file imports from its directory or package."""
    place, package = source.location.partition(":")[0], source.location.partition(".")[0]
    directory = Path(place).absolute().parent
    digests: set[str] = set()
    for name, module in list(sys.modules.items()):
        path = Path(getattr(module, "__file__", None) or "")
        beside = path.is_relative_to(directory) and "site-packages" not in path.parts
        beside = beside and not name.startswith(USER_MODULE_PREFIX)
        is_model_code = (
            beside if source.kind == "python" else source.kind == "import" and name.split(".")[0] == package
        )
        if is_model_code and path.suffix == ".py" and path.is_file():
            digests.add(f"{path.name} {hashlib.sha256(path.read_bytes()).hexdigest()}")
    return sorted(digests)


def _other_code(source: ModelSource, config: Config) -> list[str]:
    """Return digests of the files with the code of the loss, the metric and the twins."""
    functions = (source.loss, source.metric)
    modules = (sys.modules.get(getattr(function, "__module__", None) or "") for function in functions)
    files = [*(getattr(module, "__file__", None) for module in modules), getattr(config, "twins", None)]
    return [hashlib.sha256(Path(file).read_bytes()).hexdigest() if file else "" for file in files]


def is_divisible(config: ScanConfig) -> bool:
    """Return whether the batches of an audit can be divided among processes."""
    return not any(getattr(config, option) for option in _UNDIVIDED)


def refuse_undivided(config: ScanConfig) -> None:
    """Raise a ``UsageError`` for an option of audits whose batches cannot be divided."""
    for option, why in _UNDIVIDED.items():
        if getattr(config, option):
            raise UsageError(
                f"--{option} cannot be shared among processes: {why}",
                hint=f"run it in one, or leave out --{option}",
            )


def _digest(*parts: Any) -> str:
    text = json.dumps(parts, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()


def _sampled(tensors: Mapping[str, torch.Tensor]) -> list[str]:
    return [f"{name} {tuple(t.shape)} {t.dtype} {_sample(t)}" for name, t in tensors.items()]


@torch.no_grad()
def _sample(tensor: torch.Tensor) -> str:
    if tensor.layout is not torch.strided or tensor.is_quantized or not tensor.numel():
        return ""
    flat = tensor.detach().reshape(-1)
    step = max(1, flat.numel() // _SAMPLES)
    elements = flat[::step]
    wide = elements.to(torch.complex128 if elements.is_complex() else torch.float64)
    return hashlib.sha256(str(wide.cpu().tolist()).encode()).hexdigest()
