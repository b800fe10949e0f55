"""The document of ``bench``: time, memory and accuracy of each mode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from ampaudit.report.card import CardRows, Displayable, counted
from ampaudit.report.model import Environment, InputsInfo, ModelInfo, ToolInfo, of_made_up

PARTS = ("weights", "masters", "gradients", "optimizer", "activations")  # of Memory
Status = Literal["ok", "out of memory", "not supported", "failed"]


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes in use at the peak.

    Attributes:
        weights: Parameters and buffers in their stored dtype.
        masters: FP32 parameters behind 16-bit working copies.
        activations: Everything else: activations, casts of weights, temporaries and the batch.
    """

    weights: int
    masters: int
    gradients: int
    optimizer: int
    activations: int

    @property
    def peak(self) -> int:
        """The total."""
        return self.weights + self.masters + self.gradients + self.optimizer + self.activations


@dataclass(frozen=True, slots=True)
class Work:
    """The work of a step, counted on tensors without data.

    Attributes:
        flops: Floating-point operations of matrix products and convolutions.
        fast_share: Share of them that tensor cores compute: those in 16 bits or in TF32.
        bytes_moved: Bytes read and written by all ops, without fusion.
        cast_bytes: Bytes read and written by conversions between dtypes.
    """

    flops: int
    fast_share: float
    bytes_moved: int
    cast_bytes: int


@dataclass(frozen=True, slots=True)
class Largest:
    """The largest batch of a mode that fits (``--max-batch``)."""

    mode: str
    batch_size: int
    how: str


@dataclass(frozen=True, slots=True)
class BenchRow:
    """One mode with one batch size.

    Attributes:
        mode: ``fp32``, ``tf32``, ``autocast``, ``half``, ``bf16``, ``converted`` or ``converted+compile``.
        how: Description of what was run.
        note: Reason why it did not run, or a remark.
        seconds: Median time of a step: a forward pass, or with training forward, backward and update.
        least: Time of the shortest step in seconds.
        most: Time of the longest step in seconds.
        peak_bytes: Measured peak of the memory that torch allocated, on the GPU or the CPU.
        workspace_bytes: Part of that peak that kernels allocated internally. It depends on the processor and
            is not predicted; null on a GPU, where it cannot be measured separately.
        memory: Predicted contents of the memory at the peak, from a run on tensors without data; null if that
            failed.
        work: Predicted operations and bytes of a step; null if that failed.
        at_best: Least time in seconds on the device named by ``--for``, a roofline estimate.
        sqnr_db: Accuracy of the least accurate output against fp32 in dB; null if all are equal, or if
            ``problem`` says why there is no number.
        finite: Whether the outputs, and in training the last loss, are finite.
        metric: Mean of the metric of the model file, if it has one.
        problem: Reason why finite outputs have no accuracy; empty for other outputs.
    """

    mode: str
    how: str
    batch_size: int
    status: Status
    note: str = ""
    seconds: float | None = None
    least: float | None = None
    most: float | None = None
    peak_bytes: int | None = None
    workspace_bytes: int | None = None
    memory: Memory | None = None
    work: Work | None = None
    at_best: float | None = None
    sqnr_db: float | None = None
    finite: bool | None = None
    metric: float | None = None
    problem: str = ""

    @property
    def per_second(self) -> float | None:
        """Samples a second."""
        return self.batch_size / self.seconds if self.seconds else None


@dataclass(frozen=True, slots=True, repr=False)
class BenchReport(Displayable):
    """Modes side by side, measured alternately in one run.

    Attributes:
        inputs: Origin of the batch; null in reports that do not state it.
    """

    schema: Literal[1]
    tool: ToolInfo
    model: ModelInfo
    device: str
    device_name: str
    dtype: str
    policy: str
    train: bool
    repeats: int
    rows: tuple[BenchRow, ...]
    target: str | None
    largest: tuple[Largest, ...]
    interrupted: bool
    notes: tuple[str, ...]
    environment: Environment
    inputs: InputsInfo | None = None
    kind: Literal["bench"] = "bench"

    def __post_init__(self) -> None:
        for row in self.rows:
            times = (row.seconds, row.least, row.most)
            if row.status == "ok" and not all(time is not None and time > 0 for time in times):
                raise ValueError("a mode that ran needs its times")

    @property
    def exit_code(self) -> int:
        """0 if at least one mode ran, otherwise 3."""
        return 0 if any(row.status == "ok" for row in self.rows) else 3

    @property
    def headline(self) -> str:
        """The verdict, and what it is about."""
        return f"{self.model.source} on {self.device_name}: {counted(len(self.rows), 'row')} of {self.steps}"

    @property
    def sizes(self) -> tuple[int, ...]:
        """The batch sizes, in the order of the rows."""
        return tuple(dict.fromkeys(row.batch_size for row in self.rows))

    @property
    def steps(self) -> str:
        """The kind of step that was measured, and random or built-in inputs if it ran on them."""
        return ("training steps" if self.train else "forward passes") + of_made_up(self.inputs)

    def card_rows(self) -> CardRows:
        """Return the modes."""
        times = ["" if row.seconds is None else f"{row.seconds:.3g} s" for row in self.rows]
        return [(r.mode, r.batch_size, r.status, s) for r, s in zip(self.rows, times, strict=True)]
