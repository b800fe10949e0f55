"""A branch being written: values so far, and the choices that a template or a schema leaves open.

Each line is run at once on real tensors, in the dtypes that the model will have; what torch refuses is
dropped. So the vocabulary may be generous.
"""

from __future__ import annotations

import math
import random
import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch

from tests.support.soundness.program import NAMESPACE, Branch, Input, Stored, torchs_own_kernels
from tests.support.soundness.steps import VIEWS, WRITES

NUMBERS = (
    *(0.0, 1.0, -1.0, 2.0, -2.0, 0.5, -0.5, 3.0, -0.3, 0.1, 10.0, 1e-4, 1e-8, 1e-12, 1e4, 6e4, -6e4, 1.5),
    *(0.9999, 1.0007, 2.7013),  # which 16 bits do not hold
)
WHOLE_NUMBERS = (0, 1, -1, 2, -2, 3, 5, 100, -100, 255)
FLOAT_RANGES = (
    *[(-1.0, 1.0)] * 4, (0.0, 1.0), (-300.0, 20.0), (5.0, 5.0), (0.0, 6e4), (-6e4, 6e4), (1e4, 5e4),
    (-1e-8, 1e-8), (0.0, 1e-8), (-8.0, -2.0), (0.5, 2.0), (-3.0, 0.0), (0.0, 0.0), (-1e-3, 4.0),
    (1.0, 1.001), (-20.0, 20.0), (300.0, 300.0), (-1000.0, -999.0),
)  # fmt: skip
INTEGER_RANGES: dict[torch.dtype, tuple[tuple[int, int], ...]] = {
    torch.uint8: ((0, 255), (0, 3), (200, 255)),
    torch.int8: ((-128, 127), (0, 3), (-128, -128)),
    torch.int16: ((-(2**15), 2**15 - 1), (0, 3), (-200, 300)),
    torch.int32: ((-(2**31), 2**31 - 1), (0, 3), (-50000, 50000)),
    torch.int64: ((-1000, 1000), (0, 3), (0, 3), (-(2**62), 2**62)),
    torch.bool: ((0, 1),),
}
DTYPES = (
    "torch.float32 torch.float32 torch.float16 torch.bfloat16 torch.float64 torch.int8 torch.uint8"
    " torch.int16 torch.int32 torch.int64 torch.bool"
).split()
MAX_ELEMENTS = 4096
ALTERNATIVES = re.compile(r"<([^<>{}]*(?:\{[^{}]*\}[^<>{}]*)*)>")
TOKEN = re.compile(r"\{(\w+)\}")


class Refused(Exception):
    """Nothing fits a template, or torch refuses what it gives."""


class Draft:
    """Writes a branch from a seed.

    Args:
        seed: of every choice.
        lower: the dtype of inputs and parameters, if the policy stores them in 16 bits.
    """

    def __init__(self, seed: int, lower: torch.dtype | None) -> None:
        self.random = random.Random(seed)
        self.lower = lower
        self.inputs: list[Input] = []
        self.stored: list[Stored] = []
        self.lines: list[str] = []
        self.values: dict[str, Any] = {}
        self.given: dict[str, torch.Tensor] = {}  # inputs and weights as they were
        self.last: torch.Tensor = torch.zeros(())  # the operand that a template chose last
        self.axis, self.width, self.groups = -1, 1, 1  # of the template that is being filled
        for _ in range(self.random.choice((1, 1, 2))):
            self.add_input(self.shape())
        if self.random.random() < 0.25:
            self.add_input(self.shape(), self.random.choice(tuple(INTEGER_RANGES)))

    def branch(self) -> Branch:
        """What was written."""
        return Branch(tuple(self.inputs), tuple(self.stored), tuple(self.lines)).pruned()

    def shape(self) -> tuple[int, ...]:
        """Of zero to five axes, mostly two to four, now and then an empty one."""
        rank = self.random.choices(range(6), (5, 12, 21, 29, 23, 10))[0]
        sizes = self.random.choices((0, 1, 2, 3, 4, 5, 6, 8), (1, 14, 20, 20, 15, 10, 5, 15), k=rank)
        return tuple(sizes) if math.prod(sizes) <= MAX_ELEMENTS // 4 else self.shape()

    def add_input(self, shape: tuple[int, ...], dtype: torch.dtype | None = None) -> str:
        """A new input, with a range of its own."""
        name = f"x{len(self.inputs)}"
        own = dtype or self.lower or torch.float32
        low, high = self.random.choice(FLOAT_RANGES if dtype is None else INTEGER_RANGES[dtype])
        layout = self.random.choices(("dense", "transposed", "expanded", "sliced"), (14, 3, 2, 1))[0]
        self.inputs.append(Input(name, shape, own, float(low), float(high), layout))
        generator = torch.Generator().manual_seed(self.random.randrange(1 << 20))
        spread = torch.rand(shape, generator=generator, dtype=torch.float64) * (high - low) + low
        self._give(name, self.inputs[-1].tensor(spread))
        return name

    def store(self, text: str, kind: str | None = None) -> str:
        """A new parameter or buffer with the values of a text."""
        name = f"p{len(self.stored)}"
        kind = kind or self.random.choices(("parameter", "buffer", "attribute"), (6, 3, 1))[0]
        self.stored.append(Stored(name, kind, text))
        tensor = self.stored[-1].tensor()
        if self.lower is not None and tensor.dtype is torch.float32 and kind != "attribute":
            tensor = tensor.to(self.lower)
        self._give(name, tensor)
        return name

    def _give(self, name: str, tensor: torch.Tensor) -> None:
        self.values[name], self.given[name] = tensor, tensor.clone()

    def weight(self, shape: Sequence[int], kind: str | None = None) -> str:
        """A stored tensor: of normal numbers, or large, tiny, constant, transposed, repeated."""
        seed, sizes = self.random.randrange(1000), ", ".join(map(str, shape))
        comma = ", " if sizes else ""
        first = ", ".join(map(str, reversed(shape)))
        texts = [f"normal({seed}{comma}{sizes})"] * 6 + [
            f"normal({seed}{comma}{sizes}, scale=100.0)",
            f"normal({seed}{comma}{sizes}, scale=1e-4)",
            f"uniform({seed}{comma}{sizes}, low=0.5, high=2.0)",
            f"uniform({seed}{comma}{sizes}, low=-0.9, high=0.9)",
            f"normal({seed}{comma}{sizes}, scale=0.01, shift=3.0)",
            f"torch.zeros(({sizes}{',' if sizes else ''}))",
            f"torch.ones(({sizes}{',' if sizes else ''}))",
            f"normal({seed}{comma}{first}).permute({list(range(len(shape)))[::-1]})",
            f"normal({seed}).expand({sizes})" if shape else f"normal({seed})",
        ]
        return self.store(self.random.choice(texts), kind)

    # what a template may ask for

    def tensors(self, accepts: Callable[[torch.Tensor], bool] = lambda t: True) -> list[str]:
        """Texts of the values, and of the parts of lists, that fit."""
        found = []
        for name, value in self.values.items():
            if isinstance(value, torch.Tensor):
                found += [name] * accepts(value)
            elif isinstance(value, list | tuple):
                pieces = enumerate(value)
                found += [f"{name}[{i}]" for i, p in pieces if isinstance(p, torch.Tensor) and accepts(p)]
        return found

    def value(self, text: str) -> Any:
        """The value of a text."""
        return eval(text, NAMESPACE, self.values)

    def pick(self, accepts: Callable[[torch.Tensor], bool] = lambda t: True) -> str:
        """One of the values that fit, mostly the latest; it counts as the last operand."""
        found = self.tensors(accepts)
        if not found:
            raise Refused("no such value")
        text = found[-1] if self.random.random() < 0.6 else self.random.choice(found)
        self.last = self.value(text)
        return text

    def partner(self, shape: Sequence[int]) -> str:
        """A tensor that broadcasts with a shape: a value, or a new weight."""

        def fits(t: torch.Tensor) -> bool:
            pairs = zip(reversed(t.shape), reversed(tuple(shape)), strict=False)
            return all(a == b or a == 1 or b == 1 for a, b in pairs)

        found = self.tensors(fits)
        if found and self.random.random() < 0.6:
            return self.random.choice(found)
        sizes = [size if self.random.random() < 0.8 else 1 for size in shape]
        cut = self.random.choice((0, 0, len(sizes) - 1, len(sizes)))
        made = sizes[max(cut, 0) :]
        if self.random.random() < 0.15:
            text = ", ".join(map(str, made))
            comma = ", " if text else ""
            kind = self.random.choice(
                ("torch.int64", "torch.int32", "torch.uint8", "torch.int8", "torch.bool")
            )
            return self.store(f"whole({self.random.randrange(99)}{comma}{text}, high=9).to({kind})", "buffer")
        return self.weight(made)

    def number(self) -> str:
        """A Python number."""
        if self.random.random() < 0.15:
            return repr(self.random.choice(WHOLE_NUMBERS))
        return repr(self.random.choice(NUMBERS))

    def index(self, size: int, shape: Sequence[int]) -> str:
        """A stored tensor of indices below a size."""
        if size < 1:
            raise Refused("nothing to index")
        sizes = ", ".join(map(str, shape))
        return self.store(
            f"whole({self.random.randrange(99)}{', ' if sizes else ''}{sizes}, high={size})", "buffer"
        )

    # lines

    def fill(self, template: str) -> str:
        """A template with every alternative and token chosen."""
        while match := ALTERNATIVES.search(template):
            template = (
                template[: match.start()] + self.random.choice(match[1].split("|")) + template[match.end() :]
            )
        return TOKEN.sub(lambda match: getattr(self, f"token_{match[1]}")(), template)

    def write(self, template: str) -> None:
        """Add the lines of a template, in which capitals stand for new values.

        Raises:
            Refused: torch does not run them.
        """
        before = (len(self.inputs), len(self.stored), len(self.lines), dict(self.values))
        rank = self.last.ndim
        self.axis = self.random.choice((-1, -1, -1, rank - 1, 0, 1))
        self.width = self.random.choice((1, 3, 8))
        try:
            names: dict[str, str] = {}
            for part in self.fill(template).split("; "):
                self._run(part, names)
        except (Refused, RuntimeError, TypeError, ValueError, IndexError, NotImplementedError, AttributeError,
                ZeroDivisionError, OverflowError, AssertionError) as error:  # fmt: skip
            del self.inputs[before[0] :], self.stored[before[1] :], self.lines[before[2] :]
            self.values = before[3]
            changed = [
                n for n, t in self.given.items() if n in self.values and self.values[n].shape != t.shape
            ]
            self.values.update((name, self.given[name].clone()) for name in changed)
            raise Refused(str(error)) from error

    def _run(self, part: str, names: dict[str, str]) -> None:
        known = re.sub(r"(?<![\w.'])([A-Z])(?![\w'])(?! = )", lambda m: names.get(m[1], m[1]), part)
        match = re.match(r"([A-Z]) = ", known)
        if match is None:
            self._execute(known)
            self.lines.append(known)
            return
        names[match[1]] = f"v{1 + max((int(n[1:]) for n in self.values if n[0] == 'v'), default=-1)}"
        line = f"{names[match[1]]} = {known[match.end() :]}"
        self._execute(line)
        made = self.values[names[match[1]]]
        pieces = made if isinstance(made, list | tuple) else [made]
        tensors = [p for p in pieces if isinstance(p, torch.Tensor)]
        if not tensors or any(t.numel() > MAX_ELEMENTS or t.ndim > 6 or t.is_sparse for t in tensors):
            raise Refused("not a tensor of moderate size")
        self.lines.append(line)

    def _execute(self, line: str) -> None:
        sizes = {n: v.shape for n, v in self.values.items() if "out=" in line and isinstance(v, torch.Tensor)}
        with torch.no_grad(), torchs_own_kernels(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            exec(line, NAMESPACE, self.values)
        self.values.pop("__builtins__", None)
        if any(self.values[name].shape != shape for name, shape in sizes.items()):
            raise Refused(f"{line}: resizes what it writes to, which torch deprecates")
        for name, given in self.given.items():  # torch.export has no inputs that change their shape
            if name in self.values and self.values[name].shape != given.shape:
                raise Refused(f"{line}: {name} has another shape")

    # tokens of templates

    def token_t(self) -> str:
        """A floating-point value."""
        return self.pick(lambda t: t.is_floating_point())

    def token_m(self) -> str:
        """A floating-point value of two or more axes."""
        return self.pick(lambda t: t.is_floating_point() and t.ndim > 1)

    def token_a(self) -> str:
        """Any value."""
        return self.pick(lambda t: not t.is_complex())

    def token_i(self) -> str:
        """An integer or boolean value."""
        return self.pick(lambda t: not t.is_floating_point() and not t.is_complex())

    def token_s(self) -> str:
        """A tensor that broadcasts with the last operand."""
        return self.partner(self.last.shape)

    def token_w(self) -> str:
        """A stored tensor that broadcasts with the last operand."""
        return self.weight(self.last.shape[self.random.choice((0, -1)) :] if self.last.ndim else ())

    def token_n(self) -> str:
        """A number."""
        return self.number()

    def token_k(self) -> str:
        """A small whole number."""
        return str(self.random.choice((1, 1, 2, 2, 3)))

    def token_d(self) -> str:
        """The axis of this template, mostly; else another."""
        return str(self.axis) if self.random.random() < 0.85 else self.token_dim()

    def token_dim(self) -> str:
        """Any axis of the last operand."""
        rank = max(self.last.ndim, 1)
        return str(self.random.randrange(-rank, rank))

    def token_dims(self) -> str:
        """Some axes of the last operand."""
        axes = self.random.sample(range(self.last.ndim), self.random.randint(0, self.last.ndim))
        return str([a - self.last.ndim * self.random.randint(0, 1) for a in axes])

    def token_order(self) -> str:
        """All axes of the last operand in some order."""
        return str(self.random.sample(range(self.last.ndim), self.last.ndim))

    def token_keep(self) -> str:
        """Whether axes are kept, mostly."""
        return str(self.random.random() < 0.8)

    def token_bool(self) -> str:
        """True or False."""
        return str(self.random.random() < 0.5)

    def token_dtype(self) -> str:
        """A dtype."""
        return self.random.choice(DTYPES)

    def token_shape(self) -> str:
        """The last operand's elements in another shape."""
        count, sizes = self.last.numel(), list[int]()
        while count > 1 and len(sizes) < 3:
            sizes.append(self.random.choice([n for n in range(1, count + 1) if count % n == 0]))
            count //= sizes[-1]
        sizes.append(count)
        if self.last.numel() and self.random.random() < 0.3:
            sizes[self.random.randrange(len(sizes))] = -1
        return str(sizes)

    def token_eps(self) -> str:
        """What norms add."""
        return self.random.choice(("1e-5", "1e-6", "1e-5", "1e-12", "0.0", "-1e-3", "1.0", "1e-30"))

    # operands of products, norms and selections

    def token_trailing(self) -> str:
        """The sizes of the last axes: what a layer norm is over."""
        if not self.last.ndim:
            raise Refused("no axis")
        return str(list(self.last.shape[-self.random.choice((1, 1, 1, 2)) :]))

    def token_trailing_weight(self) -> str:
        """A weight over the last axis."""
        return self.weight(self.last.shape[-1:], "parameter")

    def token_channels(self) -> str:
        """A weight per channel."""
        return self.weight(self.last.shape[1:2], self.random.choice(("parameter", "buffer")))

    def token_variances(self) -> str:
        """A positive buffer per channel, some of it tiny."""
        low = self.random.choice((1e-6, 0.5, 0.0))
        return self.store(f"uniform(3, {self.last.shape[1]}, low={low}, high=3.0)", "buffer")

    def token_matrix(self) -> str:
        """A weight of a linear layer on the last operand."""
        return self.weight((self.width, self.last.shape[-1]))

    def token_columns(self) -> str:
        """A weight that the last operand is multiplied with from the left."""
        return self.weight((self.last.shape[-1], self.width))

    def token_outputs(self) -> str:
        """A bias of a layer."""
        return self.weight((self.width,), self.random.choice(("parameter", "buffer")))

    def token_image(self) -> str:
        """Something with a batch, channels and one to three axes."""
        return self.pick(lambda t: t.is_floating_point() and t.ndim > 2)

    def _kernel(self, rank: int) -> str:
        channels = self.last.shape[1 if self.last.ndim == rank + 2 else 0]
        self.groups = self.random.choice([g for g in (1, 1, 1, 2, 3, channels) if g and channels % g == 0])
        sizes = [self.random.choice((1, 2, 3)) for _ in range(rank)]
        self.width = self.groups * self.random.choice((1, 2, 3))
        return self.weight((self.width, channels // self.groups, *sizes))

    def token_kernel1(self) -> str:
        """A weight of a convolution over one axis."""
        return self._kernel(1)

    def token_kernel2(self) -> str:
        """A weight of a convolution over two axes."""
        return self._kernel(2)

    def token_kernel3(self) -> str:
        """A weight of a convolution over three axes."""
        return self._kernel(3)

    token_kernel_bias = token_outputs

    def token_groups(self) -> str:
        """The groups of the last kernel."""
        return str(self.groups)

    def token_table(self) -> str:
        """An embedding of nine rows."""
        return self.weight((9, self.random.choice((1, 4, 8))))

    def token_indices(self) -> str:
        """Indices below nine, or below the first size."""
        found = self.tensors(lambda t: t.dtype is torch.int64)
        if found and self.random.random() < 0.3:
            return self.random.choice(found)
        sizes = self.random.choice(("", ", 3", ", 2, 2"))
        return self.store(
            f"whole(5{sizes}, high={self.random.choice((9, max(self.last.shape or (1,))))})", "buffer"
        )

    def token_indices1(self) -> str:
        """A row of indices below some size of the last operand."""
        return self.index(min(self.last.shape, default=1), (self.random.choice((1, 2, 4)),))

    def token_indices_like(self) -> str:
        """Indices of the last operand's rank."""
        return self.index(
            min(self.last.shape, default=1), [max(n - self.random.randint(0, 1), 1) for n in self.last.shape]
        )

    def token_slice(self) -> str:
        """A slice, a place, or several."""
        return self.random.choice(
            ("0", "-1", "1:", ":1", ":-1", "::2", "1:2", "None", "..., 0", ":, 0", "0:0", ":, 1:", "-2:")
        )

    def token_last(self) -> str:
        """The size of the last operand's last axis."""
        return str(self.last.shape[-1] if self.last.ndim else 1)

    def token_lastsize(self) -> str:
        """The last operand's sizes."""
        return str(list(self.last.shape)) if self.random.random() < 0.8 else str(list(self.last.shape[-1:]))

    def token_lastnumel(self) -> str:
        """How many elements the last operand has."""
        return str(self.last.numel())

    def token_view(self) -> str:
        """Something that may share the memory of A."""
        return self.fill(self.random.choice(VIEWS))

    def token_write(self) -> str:
        """A method that changes a value in place."""
        return self.fill(self.random.choice(WRITES))
