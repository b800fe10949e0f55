"""Infers what a name stands for from how the script uses it."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["NameUsage"]

_OPTIMIZER = re.compile(r"optim|^opt(_|\d|$|[A-Z])|^opt_")
_SCHEDULER = re.compile(r"sched")
_MODEL = re.compile(
    r"model|^net|net$|^net_|generator|discriminator|^critic|^actor|^policy_net|encoder$|decoder$|backbone|student|teacher|classifier|transformer|network"
)

_MAKES_MODELS = re.compile(r"build|factory|_fn$|func|creat|make|init|class|cls|load")
_OF_MODELS = frozenset(
    "parameters train eval half named_parameters state_dict no_sync zero_grad (call)".split()
)


@dataclass(slots=True)
class NameUsage:
    """The methods that are called on names, and the optimizers that are passed to scalers.

    Attributes:
        methods: names of methods, by dotted name.
        stepped: arguments of ``x.step(...)`` and ``x.unscale_(...)``, by x.
    """

    methods: dict[str, set[str]] = field(default_factory=dict)
    stepped: dict[str, set[str]] = field(default_factory=dict)
    _names: frozenset[str] | None = None
    _kinds: dict[str, str] = field(default_factory=dict)

    def is_scaler(self, text: str) -> bool:
        """Return whether a name is used like a gradient scaler: ``unscale_``, or ``scale`` with others."""
        used = self.methods.get(text, ())
        if "unscale_" in used:
            return True
        if "scale" not in used:
            return "scaler" in _last(text).lower() and {"step", "update"} <= set(used)
        return "step" in used or ("update" in used and "fit" not in used and "transform" not in used)

    def is_optimizer(self, text: str) -> bool:
        """Return whether a name is passed to a scaler, or is named and used like an optimizer."""
        if any(text in given and self.is_scaler(scaler) for scaler, given in self.stepped.items()):
            return True
        used = self.methods.get(text, set())
        return bool(_OPTIMIZER.search(_last(text))) and bool(used & {"zero_grad", "step"})

    def kind(self, text: str) -> str:
        """Return what a name stands for; empty if its uses do not tell."""
        known = self._kinds.get(text)
        if known is None:
            tests = {
                "scaler": self.is_scaler,
                "optimizer": self.is_optimizer,
                "scheduler": self.is_scheduler,
                "model": self.is_model,
            }
            known = next((kind for kind, test in tests.items() if test(text)), "")
            self._kinds[text] = known
        return known

    def optimizer_names(self) -> frozenset[str]:
        """Return the last components of the names of all optimizers."""
        if self._names is None:
            handed = {text for given in self.stepped.values() for text in given}
            texts = {text for text in (*self.methods, *handed) if self.is_optimizer(text)}
            self._names = frozenset(map(_last, texts))
        return self._names

    def is_scheduler(self, text: str) -> bool:
        """Return whether a name is named like a scheduler and stepped."""
        return bool(_SCHEDULER.search(_last(text))) and "step" in self.methods.get(text, ())

    def is_model(self, text: str) -> bool:
        """Return whether a name is named like a model and used like one."""
        used = self.methods.get(text, set())
        name = _last(text)
        named = _MODEL.search(name.lower()) and not _MAKES_MODELS.search(name.lower())
        return bool(named) and bool(used & _OF_MODELS)


def _last(text: str) -> str:
    return text.rpartition(".")[2]
