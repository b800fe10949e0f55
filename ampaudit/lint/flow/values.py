"""What a name in a script can stand for, as far as reading tells; what is not certain is ``UNKNOWN``."""

from __future__ import annotations

import ast
from dataclasses import dataclass
from typing import Final, TypeAlias

__all__ = [
    "MAYBE",
    "UNKNOWN",
    "UNSCALED",
    "UNSCALED_TENSOR",
    "Autocast",
    "BoundMethod",
    "Class",
    "ClassInfo",
    "Constant",
    "ContextManager",
    "DictLiteral",
    "Function",
    "FunctionInfo",
    "ImportedName",
    "Instance",
    "KnownItems",
    "LossFunction",
    "LossGradients",
    "Managed",
    "Model",
    "Optimizer",
    "ParameterGradient",
    "Parameters",
    "Scaler",
    "Scheduler",
    "StateDict",
    "Tensor",
    "Unknown",
    "Value",
]

UNSCALED: Final = ""  # a tensor that no loss scale is in
MAYBE: Final = "?"  # this or that, by the path that was taken


@dataclass(frozen=True, slots=True)
class Unknown:
    """Anything."""


UNKNOWN: Final = Unknown()


@dataclass(frozen=True, slots=True)
class ImportedName:
    """Something imported, by its dotted name: ``torch.nn.functional.mse_loss``."""

    path: str


@dataclass(frozen=True, slots=True)
class Constant:
    """A literal."""

    value: object


@dataclass(frozen=True, slots=True)
class KnownItems:
    """A tuple or list whose items are known; ``repeated`` if it stands for all of a comprehension's items."""

    items: tuple[Value, ...]
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class StateDict:
    """``x.state_dict()`` of a scaler or an optimizer."""

    kind: str
    key: str


@dataclass(frozen=True, slots=True)
class DictLiteral:
    """A dict literal: its values, and where it stands."""

    items: tuple[Value, ...]
    node: ast.AST


@dataclass(frozen=True, slots=True)
class Scaler:
    """A gradient scaler; ``enabled`` is ``None`` where it depends on something."""

    key: str
    node: ast.AST | None = None
    enabled: bool | None = True
    text: str = ""


@dataclass(frozen=True, slots=True)
class Optimizer:
    """An optimizer; ``models`` are the keys of those whose parameters it holds, ``None`` if unknown.

    ``one_of_several`` says that it is one of several, so that nothing is known about which.
    """

    key: str
    node: ast.AST | None = None
    class_name: str = ""
    models: frozenset[str] | None = None
    one_of_several: bool = False


@dataclass(frozen=True, slots=True)
class Model:
    """A module; ``wrapper`` is the parallel class around it, ``origin`` its class's dotted name."""

    key: str
    node: ast.AST | None = None
    wrapper: str = ""
    origin: str = ""


@dataclass(frozen=True, slots=True)
class Parameters:
    """Parameters of models, or one of them; ``None`` where it is not known which."""

    models: frozenset[str] | None


@dataclass(frozen=True, slots=True)
class ParameterGradient:
    """``p.grad`` of a parameter."""


@dataclass(frozen=True, slots=True)
class Scheduler:
    """A learning-rate scheduler of torch's."""

    key: str


@dataclass(frozen=True, slots=True)
class LossFunction:
    """A loss function or module of torch's, by its name: ``BCELoss``, ``mse_loss``."""

    name: str
    node: ast.AST | None = None
    reduction: str = "mean"


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor, or a structure of tensors that a model returned.

    Attributes:
        scaler_key: key of the scaler whose scale is a factor of it, ``UNSCALED`` or ``MAYBE``.
        cast: the 16-bit dtype that autocast gave it for certain, else empty.
        computed_under: the 16-bit dtype of the autocast that it was computed under, else empty.
        upcast: the call that made it float32, and nothing else since.
        model_calls: the model calls that it was computed from; ``None`` where that is not known.
        loss: the loss function that returned it, else empty.
        divided: whether it was divided or multiplied by anything; ``None`` if unknown.
        sigmoid: the call of a sigmoid that returned it.
        node: the expression that made it.
    """

    scaler_key: str = UNSCALED
    cast: str = ""
    computed_under: str = ""
    upcast: ast.AST | None = None
    model_calls: frozenset[str] | None = None
    loss: str = ""
    divided: bool | None = None
    sigmoid: ast.AST | None = None
    node: ast.AST | None = None


UNSCALED_TENSOR: Final = Tensor()  # what unknown code returned that was given no scaler


@dataclass(frozen=True, slots=True)
class LossGradients:
    """What ``torch.autograd.grad(..., create_graph=True)`` returned; ``scaler_key`` as for a tensor."""

    scaler_key: str
    computed_under: str
    node: ast.AST


@dataclass(frozen=True, slots=True)
class Autocast:
    """An autocast context; ``None`` is what is not known."""

    enabled: bool | None
    device: str | None
    dtype: str | None
    node: ast.AST | None = None
    explicit: bool = True  # a fresh torch.autocast(...), not one that somebody else enters or made
    conditional: bool = False  # on, as far as a switch is set


@dataclass(frozen=True, slots=True)
class ContextManager:
    """Another context manager that matters: ``no_grad``, ``no_sync``, ``null``."""

    kind: str


@dataclass(frozen=True, slots=True)
class Managed:
    """An object of Accelerate, Lightning, Fabric or DeepSpeed, or one that these look after."""


@dataclass(frozen=True, slots=True, eq=False)
class FunctionInfo:
    """A function or method of the file."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    owner: ClassInfo | None
    relevant: bool  # whether anything in it matters


@dataclass(frozen=True, slots=True, eq=False)
class ClassInfo:
    """A class of the file; ``bases`` are dotted names as far as they resolve."""

    node: ast.ClassDef
    bases: tuple[str, ...]
    methods: dict[str, FunctionInfo]
    base: ClassInfo | None = None

    def method(self, name: str) -> FunctionInfo | None:
        """By name, also from base classes in the same file."""
        if name in self.methods:
            return self.methods[name]
        return self.base.method(name) if self.base is not None else None

    def derives(self, *endings: str) -> bool:
        """Whether a base class has a name that ends so."""
        own = any(base.rpartition(".")[2] in endings for base in self.bases)
        return own or (self.base is not None and self.base.derives(*endings))


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the file, with the frame it was defined in."""

    info: FunctionInfo
    frame: int


@dataclass(frozen=True, slots=True)
class Class:
    """A class of the file."""

    info: ClassInfo


@dataclass(frozen=True, slots=True)
class Instance:
    """An object of a class of the file."""

    key: str
    info: ClassInfo


@dataclass(frozen=True, slots=True)
class BoundMethod:
    """A method of an instance."""

    owner: Instance
    info: FunctionInfo


Value: TypeAlias = (
    "Unknown | ImportedName | Constant | KnownItems | StateDict | DictLiteral | Scaler | Optimizer | Model"
    " | Parameters | ParameterGradient | Scheduler | LossFunction | Tensor | LossGradients | Autocast"
    " | ContextManager | Managed | Function | Class | Instance | BoundMethod"
)
