"""The document of ``convert``."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.core.text import differing_share, format_bytes
from ampaudit.findings.finding import Gap
from ampaudit.report.card import CardRows, Displayable, counted
from ampaudit.report.model import InputsInfo, of_made_up

ProblemKind = Literal["missing", "truncated", "changed", "tensor", "extra", "rounding", "program", "output"]


@dataclass(frozen=True, slots=True)
class OutputRecord:
    """One output of the converted program on the recorded inputs.

    Attributes:
        name: Path in the model's output.
        dtype: Name of the dtype in torch.
        sha256: Digest of its bytes.
        max_error: Largest absolute difference from the output of the FP32 model; null if it is not finite, or
            if the shapes differ.
        sqnr_db: Signal to quantization-noise ratio against the FP32 model in dB; for integers, 20 log10(1 /
            share that differs); null if exact.
    """

    name: str
    dtype: str
    sha256: str
    max_error: float | None
    sqnr_db: float | None

    @property
    def is_float(self) -> bool:
        """Whether its dtype is a floating-point format, real or complex."""
        return "float" in self.dtype or "complex" in self.dtype

    @property
    def differing(self) -> float | None:
        """The share of integers that differ; ``None`` for floats, and if all or none differ."""
        return None if self.is_float or self.sqnr_db is None else differing_share(self.sqnr_db)


@dataclass(frozen=True, slots=True)
class ProgramShapes:
    """The input shapes of a converted program.

    Attributes:
        inputs: Size of each dimension of each input tensor, or the name of the dimension if it may vary.
        ranges: Least and largest size of each named dimension; the largest is null if there is none.
        verified: Sizes for which the program was compared with a trace for those sizes.
    """

    inputs: dict[str, tuple[int | str, ...]]
    ranges: dict[str, tuple[int, int | None]]
    verified: tuple[dict[str, int], ...]

    @property
    def text(self) -> str:
        """The shape of each input, and the range of each dynamic dimension."""
        inputs = (f"{name}: {' x '.join(map(str, axes)) or 'scalar'}" for name, axes in self.inputs.items())
        if not self.ranges:
            fixed = "fixed; --dynamic INPUT=DIM,... lets dimensions vary"
            return f"{', '.join(inputs)} ({fixed})" if self.inputs else "no inputs"
        ranges = (
            f"{name} from {low}" + (f" to {high}" if high is not None else "")
            for name, (low, high) in self.ranges.items()
        )
        return f"{', '.join(inputs)}; {', '.join(ranges)}; {self._comparison}"

    @property
    def _comparison(self) -> str:
        tried = [", ".join(f"{name} {size}" for name, size in sizes.items()) for sizes in self.verified]
        return f"the same bits as the model at {'; at '.join(tried)}" if tried else "not compared"


@dataclass(frozen=True, slots=True, repr=False)
class Conversion(Displayable):
    """A converted directory.

    Attributes:
        source: Location of the converted model or checkpoint.
        output: Path of the directory.
        policy: Name of the policy.
        dtype: The 16-bit format.
        mode: ``inference`` or ``train``.
        verdict: Verdict of the audit; null if only weights were converted.
        exit_code: 0, or 1 if findings at or above the threshold prevented the conversion.
        bytes_before: Size of the weights before the conversion, in bytes.
        bytes_after: Size of the working weights in bytes.
        stored: Number of tensors stored in each dtype.
        kept: Reasons why tensors stay in float32, with their number, size in bytes, and the largest one.
        overflow: Number of finite values that overflow, by tensor.
        broken: Number of values that were NaN or infinite before, by tensor.
        masters: Whether masters were kept.
        outputs: Outputs of the converted program compared with FP32.
        onnx_casts: Number of casts in the ONNX file; null without one.
        onnx_error: Largest difference between ONNX Runtime and torch; null if it was not run, or in training
            mode, where the two draw different random numbers.
        files: Size in bytes of every file, by name.
        notes: Remarks for the user.
        shapes: Shapes that the program takes; null without a program.
        inputs: Origin of the batch on which the program was compared; null if only weights were converted.
        gaps: Parts of the model that were written without an audit.
    """

    source: str
    output: str
    policy: str
    dtype: str
    mode: str
    verdict: str | None
    exit_code: int
    bytes_before: int
    bytes_after: int
    stored: dict[str, int]
    kept: dict[str, tuple[int, int, str]]
    overflow: dict[str, int]
    broken: dict[str, int]
    masters: bool
    outputs: tuple[OutputRecord, ...]
    onnx_casts: int | None
    onnx_error: float | None
    files: dict[str, int]
    notes: tuple[str, ...]
    shapes: ProgramShapes | None = None
    inputs: InputsInfo | None = None
    gaps: tuple[Gap, ...] = ()
    schema: Literal[1] = 1
    kind: Literal["conversion"] = "conversion"

    @property
    def in_place(self) -> bool:
        """Whether an ONNX graph was converted directly, without an exported program."""
        return self.onnx_casts is not None and self.shapes is None

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        sizes = f"{format_bytes(self.bytes_before)} -> {format_bytes(self.bytes_after)}"
        return f"{self.source} to {self.output}: {self.policy}, {self.dtype}, {sizes}{self.audited_on}"

    @property
    def audited_on(self) -> str:
        """The random or built-in inputs of the audit; empty for other inputs."""
        made_up = of_made_up(self.inputs)
        return f", audited on a batch{made_up}" if made_up else ""

    def card_rows(self) -> CardRows:
        """Return the files."""
        return [(name, format_bytes(size)) for name, size in self.files.items()]


@dataclass(frozen=True, slots=True)
class Problem:
    """One problem: its place and description.

    Attributes:
        kind: ``missing``, ``truncated``, ``changed`` or ``extra`` for files; ``tensor`` for changed values;
            ``rounding`` if a tensor is not its rounded master; ``program`` if the program holds other
            weights; ``output`` if it computes something else.
        where: The file, with the tensor or the output if known.
    """

    kind: ProblemKind
    where: str
    what: str


@dataclass(frozen=True, slots=True, repr=False)
class Verification(Displayable):
    """The verification of a directory: counts of checks, problems, and the program's outputs."""

    directory: str
    files: int
    bytes: int
    tensors: int
    masters: int
    problems: tuple[Problem, ...]
    outputs: tuple[str, ...]
    notes: tuple[str, ...]
    schema: Literal[1] = 1
    kind: Literal["verification"] = "verification"

    @property
    def exit_code(self) -> int:
        """0 if nothing is wrong, 1 otherwise."""
        return 1 if self.problems else 0

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        problems = counted(len(self.problems), "problem")
        return f"{'FAIL' if self.problems else 'PASS'} {self.directory}: {problems}"

    def card_rows(self) -> CardRows:
        """Return the problems."""
        return [(problem.kind, problem.where, problem.what) for problem in self.problems]
