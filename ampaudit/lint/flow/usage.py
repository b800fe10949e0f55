"""What the use of a name says about it, where nothing else does."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

__all__ = ["NameUsage"]

_OPTIMIZER = re.compile(r"optim|^opt(_|\d|$|[A-Z])|^opt_")
_SCHEDULER = re.compile(r"sched")
_MODEL = re.compile(
    r"model|^net|net$|^net_|generator|discriminator|^critic|^actor|^policy_net|encoder$|decoder$|backbone"
)


@dataclass(slots=True)
class NameUsage:
    """What is done with names, by their dotted text: methods called on them, and where they are handed in.

    Attributes:
        methods: names of methods, per text.
        stepped: texts that are arguments of ``x.step(...)`` or ``x.unscale_(...)``, per x.
    """

    methods: dict[str, set[str]] = field(default_factory=dict)
    stepped: dict[str, set[str]] = field(default_factory=dict)
    _names: frozenset[str] | None = None
    _kinds: dict[str, str] = field(default_factory=dict)

    def is_scaler(self, text: str) -> bool:
        """Only a gradient scaler has ``unscale_``, or both ``scale`` and ``update`` beside ``step``."""
        used = self.methods.get(text, ())
        if "unscale_" in used:
            return True
        if "scale" not in used:
            return "scaler" in _last(text).lower() and {"step", "update"} <= set(used)
        return "step" in used or ("update" in used and "fit" not in used and "transform" not in used)

    def is_optimizer(self, text: str) -> bool:
        """It is handed to a scaler, or is called so and used so."""
        if any(text in given and self.is_scaler(scaler) for scaler, given in self.stepped.items()):
            return True
        used = self.methods.get(text, set())
        return bool(_OPTIMIZER.search(_last(text))) and bool(used & {"zero_grad", "step"})

    def kind(self, text: str) -> str:
        """What the uses of a name say that it is; empty if nothing for certain."""
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
        """The last parts of the names of all optimizers in the script."""
        if self._names is None:
            handed = {text for given in self.stepped.values() for text in given}
            texts = {text for text in (*self.methods, *handed) if self.is_optimizer(text)}
            self._names = frozenset(map(_last, texts))
        return self._names

    def is_scheduler(self, text: str) -> bool:
        """It is called so and is stepped."""
        return bool(_SCHEDULER.search(_last(text))) and "step" in self.methods.get(text, ())

    def is_model(self, text: str) -> bool:
        """It is called so, and is trained, evaluated or asked for its parameters."""
        used = self.methods.get(text, set())
        name = _last(text)
        known = {"parameters", "train", "eval", "half", "named_parameters", "no_sync", "zero_grad", "(call)"}
        return bool(_MODEL.search(name.lower())) and bool(used & known)


def _last(text: str) -> str:
    return text.rpartition(".")[2]
