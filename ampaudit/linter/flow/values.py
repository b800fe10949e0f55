"""Abstract values of names and expressions; what is not certain is ``UNKNOWN``."""

from __future__ import annotations

import ast
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, NamedTuple, TypeAlias, TypeVar, dataclass_transform

from ampaudit.linter.diagnostic import Certainty
from ampaudit.linter.flow.syntax import dotted_name, keyword_value, last_component, simple_name
from ampaudit.linter.flow.torch_names import Framework

T = TypeVar("T")


@dataclass_transform()
def value_class(*, frozen: bool, **options: bool) -> Callable[[type[T]], type[T]]:
    """Make a dataclass that only the type checker keeps frozen: it takes half the time to create."""
    return dataclass(**options, unsafe_hash=frozen and options.get("eq", True))


UNSCALED: Final = ""  # scaler key of a tensor without a loss scale
MAYBE: Final = "?"  # differs between the paths that lead here


@value_class(frozen=True, slots=True, eq=False)
class FunctionInfo:
    """A function or method of the file."""

    node: ast.FunctionDef | ast.AsyncFunctionDef
    relevant: bool  # whether anything in it matters

    @property
    def is_static(self) -> bool:
        """Whether it is a static method."""
        return self._is_decorated("staticmethod")

    @property
    def is_property(self) -> bool:
        """Whether its instances have it as an attribute."""
        return self._is_decorated("property", "cached_property")

    @property
    def is_context_manager(self) -> bool:
        """Whether it makes a context manager, whose block runs where it yields."""
        return self._is_decorated("contextmanager")

    def _is_decorated(self, *names: str) -> bool:
        return any(simple_name(decorator) in names for decorator in self.node.decorator_list)


@dataclass(slots=True, eq=False)
class ClassInfo:
    """A class; ``bases`` are the dotted names of its base classes, ``base`` the first that is followed."""

    node: ast.ClassDef
    bases: tuple[str, ...]
    methods: dict[str, FunctionInfo]
    base: ClassInfo | None = None

    @property
    def fields(self) -> list[ast.AnnAssign]:
        """The annotated fields, those of base classes first, if it has no constructor of its own."""
        if self.method("__init__") is not None:
            return []
        annotated = [node for node in self.node.body if isinstance(node, ast.AnnAssign)]
        return [*(self.base.fields if self.base is not None else ()), *annotated]

    @property
    def is_relevant(self) -> bool:
        """Whether anything in it matters, so that what its constructor makes does as well."""
        return self.is_module or any(m.relevant for m in self.methods.values())

    @property
    def is_module(self) -> bool:
        """Whether it is a module, or a layer of torch with changes."""
        layers = ("nn.", "torch.nn.")
        return self.derives("Module", "LightningModule") or any(
            base.startswith(layers) for info in self.ancestry for base in info.bases
        )

    @property
    def ancestry(self) -> list[ClassInfo]:
        """The class and its base classes that are followed."""
        return [self, *(self.base.ancestry if self.base is not None else ())]

    def method(self, name: str) -> FunctionInfo | None:
        """Return a method by name, also from base classes that are followed."""
        return next((info.methods[name] for info in self.ancestry if name in info.methods), None)

    def attribute(self, name: str) -> ast.expr | None:
        """Return what the body of the class, or of a base class, assigns to a name."""
        statements = (
            node for info in self.ancestry for node in info.node.body if isinstance(node, ast.Assign)
        )
        return next((s.value for s in statements if name in map(dotted_name, s.targets)), None)

    def derives(self, *endings: str) -> bool:
        """Return whether the last component of a base class's name is one of some names."""
        return any(last_component(base) in endings for info in self.ancestry for base in info.bases)


@value_class(frozen=True, slots=True)
class Function:
    """A function of the file, with the frame that defines it; or a method, with its owner."""

    info: FunctionInfo
    frame: int | None = None
    owner: Instance | None = None


@value_class(frozen=True, slots=True)
class Class:
    """A class of the file."""

    info: ClassInfo


@value_class(frozen=True, slots=True)
class Instance:
    """An instance of a class of the file."""

    key: str
    info: ClassInfo


@value_class(frozen=True, slots=True)
class Unknown:
    """Any value."""


UNKNOWN: Final = Unknown()


@value_class(frozen=True, slots=True)
class ImportedName:
    """An imported or built-in object, by its dotted name."""

    path: str


@value_class(frozen=True, slots=True)
class LiteralValue:
    """The value of a literal, or of a test that the script determines.

    ``is_given`` if it is an argument of a call, or of such a test, and so not assigned later.
    """

    value: object
    is_given: bool = False


def device_of(value: Value | None) -> str:
    """Return the device type, such as ``cuda`` for ``"cuda:0"``; empty if it is not a literal."""
    if isinstance(value, DeviceValue):
        return value.type
    text = value.value if isinstance(value, LiteralValue) else ""
    if isinstance(text, str):
        head = text.partition(":")[0]
        return head if head in ("cuda", "cpu", "mps", "xpu") else ""
    return "cuda" if isinstance(text, int) and not isinstance(text, bool) else ""


def literal_of(value: Value | None) -> object:
    """Return what a literal stands for; ``None`` for other values as well."""
    return value.value if isinstance(value, LiteralValue) else None


@value_class(frozen=True, slots=True)
class Remainder:
    """A remainder such as that of a count of batches, or a test of one, as in ``(i + 1) % 4 == 0``."""


@value_class(frozen=True, slots=True)
class KnownItems:
    """A tuple or list of known items; ``repeated`` if one item stands for those of a comprehension."""

    items: tuple[Value, ...]
    repeated: bool = False


@value_class(frozen=True, slots=True)
class StateDict:
    """``x.state_dict()`` of a scaler or an optimizer."""

    kind: str
    key: str


_MAX_ITEMS: Final = 256  # of a dict, of which a literal may have more


@value_class(frozen=True, slots=True)
class DictLiteral:
    """The values of a dict that a literal makes, and its node; keys that are not texts are ``None``."""

    items: tuple[Value, ...]
    node: ast.AST
    names: tuple[str | None, ...]

    def item(self, name: object) -> Value | None:
        """Return the value of a key."""
        return dict(zip(self.names, self.items, strict=True)).get(name) if isinstance(name, str) else None

    def with_item(self, name: object, value: Value) -> DictLiteral:
        """Return the dict after an item is set."""
        if isinstance(name, str) and name in self.names:
            items = (
                value if existing == name else old
                for existing, old in zip(self.names, self.items, strict=True)
            )
            return DictLiteral(tuple(items), self.node, self.names)
        if (value in self.items and not isinstance(name, str)) or len(self.items) >= _MAX_ITEMS:
            return self  # which key it has is not known: a join of two paths would double such items
        key = name if isinstance(name, str) else None
        return DictLiteral((*self.items, value), self.node, (*self.names, key))


@value_class(frozen=True, slots=True)
class Scaler:
    """A gradient scaler; ``enabled`` is ``None`` if a condition decides, ``optional`` if it may be None."""

    key: str
    node: ast.AST | None = None
    enabled: bool | None = True
    text: str = ""
    sharded: bool = False
    optional: bool = False


@value_class(frozen=True, slots=True)
class Optimizer:
    """An optimizer; ``models`` are the keys of the models whose parameters it has, ``None`` if unknown.

    ``one_of_several`` marks an item of a collection, where it is not known which.
    """

    key: str
    class_name: str = ""
    models: frozenset[str] | None = None
    one_of_several: bool = False


@value_class(frozen=True, slots=True)
class Model:
    """A module.

    Attributes:
        key: Key of the object.
        node: Expression that creates it.
        wrapper: Parallel class around it, such as ``DataParallel``.
        origin: Dotted name of its class.
        layers: Classes of its torch layers in order, or its own class if it is a layer; empty if unknown.
        instance: Instance, if a linted file defines its class.
        modules: Modules of a ``Sequential`` of which a linted file defines some, in order.
    """

    key: str
    node: ast.AST | None = None
    wrapper: str = ""
    origin: str = ""
    layers: tuple[str, ...] = ()
    instance: Instance | None = None
    modules: tuple[Model, ...] = ()


@value_class(frozen=True, slots=True)
class Parameters:
    """One or all parameters of models, or copies of them.

    Attributes:
        models: Keys of the models; ``None`` if unknown.
        dtype: Dtype to which they were cast; empty without a cast.
        cast: Cast to 16 bits.
        decayed: Whether they were just multiplied in place.
        is_copy: Whether they are copies, or may be.
    """

    models: frozenset[str] | None
    dtype: str = ""
    cast: ast.AST | None = None
    decayed: bool = False
    is_copy: bool = False


@value_class(frozen=True, slots=True)
class GradAttribute:
    """``p.grad`` of a parameter."""


@value_class(frozen=True, slots=True)
class Scheduler:
    """A learning-rate scheduler of torch."""


@value_class(frozen=True, slots=True)
class LossFunction:
    """A loss function or module of torch, by name, such as ``BCELoss`` or ``mse_loss``."""

    name: str
    node: ast.AST | None = None


class Tensor(NamedTuple):
    """A tensor, or a structure of tensors that a model returned.

    Attributes:
        scaler_key: Key of the scaler that scaled it, ``UNSCALED`` or ``MAYBE``.
        dtype: Dtype, if it is certain; ``integer`` for masks and whole numbers, which promote no float,
            ``number`` for numbers of Python, which promote nothing.
        weights_dtype: 16-bit dtype of the weights of the model that returned it, else empty.
        computed_under: 16-bit dtype of autocast when it was computed, else empty.
        upcast: Whether it was cast to float32, and no op followed.
        model_calls: Model calls that it depends on; ``None`` if unknown.
        loss: Loss function that returned it, else empty.
        divided: Whether it was divided by something.
        sigmoid: Call of sigmoid that returned it.
        rounded: Cast to 16 bits of the positions or times from which it is computed.
        is_detached: Whether it is detached from its graph.
        is_on_cpu: Whether it was moved to the CPU.
        node: Expression that created it.
    """

    scaler_key: str = UNSCALED
    dtype: str = ""
    weights_dtype: str = ""
    computed_under: str = ""
    upcast: bool = False
    model_calls: frozenset[str] | None = None
    loss: str = ""
    divided: bool = False
    sigmoid: ast.AST | None = None
    rounded: ast.AST | None = None
    is_detached: bool = False
    is_on_cpu: bool = False
    node: ast.AST | None = None

    @property
    def cast(self) -> str:
        """The 16-bit dtype that it certainly has, else empty."""
        return "" if self.dtype in ("float32", "float64", "integer", "number") else self.dtype


UNSCALED_TENSOR: Final = Tensor()  # the result of unknown code that had no scaler
NUMBER: Final = Tensor(dtype="number", model_calls=frozenset())  # of Python, such as a size


@value_class(frozen=True, slots=True)
class LossGradients:
    """The result of ``torch.autograd.grad(..., create_graph=True)``, which becomes part of a loss."""

    scaler_key: str
    node: ast.AST


@value_class(frozen=True, slots=True)
class ScaleReading:
    """The result of ``scaler.get_scale()``."""

    scaler_key: str


@value_class(frozen=True, slots=True)
class DeviceValue:
    """A ``torch.device``; its type is empty if unknown; ``has_index`` if it is one of several."""

    type: str
    has_index: bool = False


@value_class(frozen=True, slots=True)
class DtypeChoice:
    """One of several dtypes, as in ``torch.float16 if args.fp16 else torch.float32``, by their names."""

    names: frozenset[str]


@value_class(frozen=True, slots=True)
class Partial:
    """A function with the first of its arguments, as ``functools.partial`` makes it in a call."""

    function: Value
    positional: tuple[Value, ...]
    keywords: tuple[tuple[str, Value], ...]
    node: ast.Call


@value_class(frozen=True, slots=True)
class Managed:
    """An object that Accelerate, Lightning, Fabric or DeepSpeed manages.

    Attributes:
        framework: Framework, if it is known which.
        scales: Certainty that it scales the loss.
        divides: Whether its backward divides the loss by the number of accumulated batches.
        weights_dtype: 16-bit dtype of the weights, if its configuration names it, and casts no inputs.
        model: Model that it wraps, if it is one.
        autocast: Dtype of the autocast in which it calls models, if it is certain; else empty.
    """

    framework: Framework | None = None
    scales: Certainty = Certainty.UNKNOWN
    divides: bool = False
    weights_dtype: str = ""
    model: Model | None = None
    autocast: str = ""


Value: TypeAlias = (
    "Unknown | ImportedName | LiteralValue | Remainder | KnownItems | StateDict | DictLiteral"
    " | Optimizer | Scaler | Model | Parameters | DeviceValue | GradAttribute | ScaleReading | Scheduler"
    " | Tensor | LossFunction | LossGradients | Autocast | ContextManager | DtypeChoice | Managed | Function"
    " | Class | Instance | Partial"
)


@value_class(frozen=True, slots=True)
class Autocast:
    """An autocast context; ``None`` stands for unknown."""

    enabled: bool | None
    device: str | None
    dtype: str | None
    node: ast.AST | None = None
    explicit: bool = True  # a torch.autocast(...) of this script, not of unknown code
    conditional: bool = False  # enabled by a setting that is assumed to be on
    caches: bool = True  # keeps the casts of weights

    @property
    def is_certain(self) -> bool:
        """Whether it is on, and a block of this script."""
        return self.enabled is True and self.explicit

    @property
    def computes_float16(self) -> bool:
        """Whether it computes in float16, also if a setting may switch it off."""
        by_default = self.dtype == "" and self.device == "cuda"
        return self.enabled is True and (by_default or self.dtype == "float16")


@value_class(frozen=True, slots=True)
class ContextManager:
    """Another relevant context manager: ``no_grad``, ``no_sync``, ``null``."""

    kind: str


@value_class(frozen=True, slots=True)
class Call:
    """A call with the values of its arguments.

    Attributes:
        positional: Values of arguments by position.
        keywords: Values of arguments by name.
        node: Call expression.
    """

    positional: list[Value]
    keywords: dict[str, Value]
    node: ast.Call

    def get(self, index: int, name: str) -> Value | None:
        """Return the value of a parameter, by position or name."""
        if index < len(self.positional):
            return self.positional[index]
        return self.keywords.get(name)

    @property
    def first(self) -> Value:
        """The first positional value; unknown if there is none."""
        return self.positional[0] if self.positional else UNKNOWN

    def all(self) -> list[Value]:
        """Return the values of all arguments."""
        return [*self.positional, *self.keywords.values()]

    def named(self) -> dict[str, Value]:
        """Return the values by name or, as text, by position, as ``inline_call`` takes them."""
        return {**{str(index): value for index, value in enumerate(self.positional)}, **self.keywords}

    def expression(self, index: int, name: str) -> ast.expr | None:
        """Return the expression of an argument."""
        if index < len(self.node.args):
            return self.node.args[index]
        return keyword_value(self.node, name)
