from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, Literal, overload

import torch
from torch import nn

from ampaudit.audit.config import PlanConfig as PlanConfig
from ampaudit.audit.config import Rules
from ampaudit.audit.config import ScanConfig as ScanConfig
from ampaudit.audit.inputs import Inputs, ModelLike, SizedInputs
from ampaudit.benchmarking.config import BenchConfig as BenchConfig
from ampaudit.ci.assertion import UnsafeModel as UnsafeModel
from ampaudit.ci.config import CheckConfig as CheckConfig
from ampaudit.core import __version__ as __version__
from ampaudit.core.errors import AuditError as AuditError
from ampaudit.core.errors import CouldNotAudit as CouldNotAudit
from ampaudit.core.errors import InputError as InputError
from ampaudit.core.errors import OutputError as OutputError
from ampaudit.core.errors import PolicyError as PolicyError
from ampaudit.core.errors import ProofBroken as ProofBroken
from ampaudit.core.errors import ReferenceBroken as ReferenceBroken
from ampaudit.core.errors import RunFailed as RunFailed
from ampaudit.core.errors import SourceError as SourceError
from ampaudit.core.errors import TraceFailed as TraceFailed
from ampaudit.core.errors import UsageError as UsageError
from ampaudit.core.errors import WeightsError as WeightsError
from ampaudit.core.session import Session as Session
from ampaudit.core.source_config import SourceConfig as SourceConfig
from ampaudit.devices.catalogue import Device
from ampaudit.export.config import ConvertConfig as ConvertConfig
from ampaudit.export.config import VerifyConfig as VerifyConfig
from ampaudit.findings.finding import Finding as Finding
from ampaudit.findings.finding import Severity as Severity
from ampaudit.linter.config import LintConfig as LintConfig
from ampaudit.policy import Policy as Policy
from ampaudit.policy import RuleSet
from ampaudit.policy import load_policy as load_policy
from ampaudit.recording.calls import Recording
from ampaudit.recording.config import RecordConfig as RecordConfig
from ampaudit.report.bench import BenchReport as BenchReport
from ampaudit.report.check import CheckResults as CheckResults
from ampaudit.report.compare import DiffConfig as DiffConfig
from ampaudit.report.compare import Saved
from ampaudit.report.compare import read_report as read_report
from ampaudit.report.conversion import Conversion as Conversion
from ampaudit.report.conversion import Verification as Verification
from ampaudit.report.difference import Differences as Differences
from ampaudit.report.lint import LintReport as LintReport
from ampaudit.report.model import Comparison as Comparison
from ampaudit.report.model import Report as Report
from ampaudit.report.plan import PlanReport as PlanReport
from ampaudit.report.training import TrainingReport as TrainingReport
from ampaudit.report.tuning import TuningReport as TuningReport
from ampaudit.trace.twins import twin as twin
from ampaudit.training.config import TrainConfig as TrainConfig
from ampaudit.training.prepare import LossScaler as LossScaler
from ampaudit.training.prepare import Prepared as Prepared
from ampaudit.training.prepare import prepare as prepare
from ampaudit.training.prepare import scaler as scaler
from ampaudit.training.watch import TrainingMonitor as TrainingMonitor
from ampaudit.training.watch import watch as watch
from ampaudit.tuning.config import TuneConfig as TuneConfig

def assert_safe(
    model: ModelLike,
    inputs: Inputs | None = ...,
    *,
    batches: Iterable[Inputs] | None = ...,
    source: SourceConfig | None = ...,
    allow: str | Iterable[str] = ...,
    session: Session = ...,
    policy: str | Path | RuleSet = ...,
    dtype: str | torch.dtype = ...,
    device: str = ...,
    seed: int = ...,
    twins: str | Path | None = ...,
    memory: str = ...,
    against: Any = ...,
    backward: bool = ...,
    loss: Callable[..., Any] | None = ...,
    loss_scale: float | None = ...,
    sensitivity: bool = ...,
    ranges: bool = ...,
    fail_on: Literal["error", "gap", "warning", "note", "never"] = ...,
    min_headroom: float = ...,
    min_sqnr: float = ...,
    advise: bool = ...,
    diff: bool = ...,
    contract: str = ...,
    prove: bool = ...,
    stress: int = ...,
    stress_dir: str | Path = ...,
    steps: int | None = ...,
    next_inputs: Any = ...,
    static: bool = ...,
    assume: Sequence[str] = ...,
    ignore: Sequence[str] = ...,
    sweep: str | Mapping[str, Sequence[int]] = ...,
) -> Report: ...
def bench(
    model: ModelLike,
    inputs: Inputs | None = ...,
    *,
    source: SourceConfig | None = ...,
    config: BenchConfig | None = ...,
    session: Session = ...,
    train: bool = ...,
    modes: str | Sequence[str] = ...,
    sizes: str | Sequence[int] = ...,
    target: str | Device | None = ...,
    max_batch: bool = ...,
    repeats: int = ...,
    policy: str | Path | RuleSet = ...,
    dtype: str | torch.dtype = ...,
    device: str = ...,
    seed: int = ...,
    loss: Callable[..., Any] | None = ...,
) -> BenchReport: ...
def check(
    targets: str | Path | Iterable[str | Path] = ...,
    *,
    config: CheckConfig | None = ...,
    session: Session = ...,
    policy: str | Path = ...,
    dtype: str | torch.dtype = ...,
    device: str = ...,
    fail_on: Literal["error", "gap", "warning", "note", "never"] = ...,
    allow: Sequence[str] = ...,
    ignore: Sequence[str] = ...,
    min_headroom: float | None = ...,
    min_sqnr: float | None = ...,
    max_metric_drop: float | None = ...,
    max_fp32_share: float | None = ...,
    baseline: str | Path | None = ...,
    update_baseline: bool = ...,
    weights: str | Path | None = ...,
    inputs: str | Path | None = ...,
    text: str | Path | None = ...,
    images: str | Path | None = ...,
    audio: str | Path | None = ...,
    twins: str | Path | None = ...,
    batches: int | None = ...,
    seed: int = ...,
    train: bool = ...,
    trust: bool = ...,
    jobs: int = ...,
    timeout: float | None = ...,
    max_memory: str | None = ...,
) -> CheckResults: ...
def convert(
    model: ModelLike,
    inputs: Inputs | None = ...,
    output: str | Path = ...,
    *,
    source: SourceConfig | None = ...,
    config: ConvertConfig | None = ...,
    session: Session = ...,
    policy: str | Path | RuleSet = ...,
    dtype: str | torch.dtype = ...,
    device: str = ...,
    seed: int = ...,
    mode: Literal["inference", "train"] = ...,
    masters: bool = ...,
    program: bool = ...,
    onnx: bool = ...,
    io: Literal["float32", "float16", "bfloat16"] = ...,
    tune: float | None = ...,
    rescale: bool = ...,
    dynamic: Sequence[str] = ...,
    fail_on: Literal["error", "gap", "warning", "note", "never"] = ...,
    min_headroom: float = ...,
    min_sqnr: float = ...,
    ignore: Sequence[str] = ...,
    force: bool = ...,
    weights: str | Path | None = ...,
) -> tuple[Report, Conversion | None]: ...
def diff(
    old: Saved, new: Saved, *, config: DiffConfig | None = ..., bits: float = ..., decibels: float = ...
) -> Differences: ...
def lint(
    paths: str | Path | Iterable[str | Path] = ...,
    *,
    config: LintConfig | None = ...,
    select: Sequence[str] = ...,
    ignore: Sequence[str] = ...,
    per_file_ignores: Mapping[str, Sequence[str]] | Sequence[str] = ...,
    exclude: Sequence[str] = ...,
    gitignore: bool = ...,
    unsafe_fixes: bool = ...,
    baseline: str | Path | None = ...,
    fail_on: Literal["error", "warning", "never"] = ...,
) -> LintReport: ...
def plan(
    model: ModelLike,
    inputs: Inputs | None = ...,
    *,
    source: SourceConfig | None = ...,
    config: PlanConfig | None = ...,
    session: Session = ...,
    policy: str | Path | RuleSet = ...,
    dtype: str | torch.dtype = ...,
    device: str = ...,
    seed: int = ...,
    twins: str | Path | None = ...,
    memory: str = ...,
) -> PlanReport: ...
@overload
def record(
    module: nn.Module,
    directory: str | Path,
    *,
    config: RecordConfig | None = ...,
    every: int = ...,
    first: int = ...,
    max_bytes: int | str = ...,
    force: bool = ...,
) -> AbstractContextManager[Recording]: ...
@overload
def record(
    module: Mapping[str, nn.Module],
    directory: str | Path,
    *,
    config: RecordConfig | None = ...,
    every: int = ...,
    first: int = ...,
    max_bytes: int | str = ...,
    force: bool = ...,
) -> AbstractContextManager[dict[str, Recording]]: ...
@overload
def scan(
    model: ModelLike,
    inputs: Inputs | SizedInputs | None = ...,
    *,
    policy: Rules = ...,
    batches: Iterable[Inputs] | None = ...,
    source: SourceConfig | None = ...,
    config: ScanConfig | None = ...,
    session: Session = ...,
    dtype: str | torch.dtype = ...,
    device: str = ...,
    seed: int = ...,
    twins: str | Path | None = ...,
    memory: str = ...,
    against: Any = ...,
    backward: bool = ...,
    loss: Callable[..., Any] | None = ...,
    loss_scale: float | None = ...,
    sensitivity: bool = ...,
    ranges: bool = ...,
    fail_on: Literal["error", "gap", "warning", "note", "never"] = ...,
    min_headroom: float = ...,
    min_sqnr: float = ...,
    advise: bool = ...,
    diff: bool = ...,
    contract: str = ...,
    prove: bool = ...,
    stress: int = ...,
    stress_dir: str | Path = ...,
    steps: int | None = ...,
    next_inputs: Any = ...,
    static: bool = ...,
    assume: Sequence[str] = ...,
    ignore: Sequence[str] = ...,
    sweep: str | Mapping[str, Sequence[int]] = ...,
) -> Report: ...
@overload
def scan(
    model: ModelLike,
    inputs: Inputs | SizedInputs | None = ...,
    *,
    policy: list[Rules] | tuple[Rules, ...],
    batches: Iterable[Inputs] | None = ...,
    source: SourceConfig | None = ...,
    config: ScanConfig | None = ...,
    session: Session = ...,
    dtype: str | torch.dtype = ...,
    device: str = ...,
    seed: int = ...,
    twins: str | Path | None = ...,
    memory: str = ...,
    against: Any = ...,
    backward: bool = ...,
    loss: Callable[..., Any] | None = ...,
    loss_scale: float | None = ...,
    sensitivity: bool = ...,
    ranges: bool = ...,
    fail_on: Literal["error", "gap", "warning", "note", "never"] = ...,
    min_headroom: float = ...,
    min_sqnr: float = ...,
    advise: bool = ...,
    diff: bool = ...,
    contract: str = ...,
    prove: bool = ...,
    stress: int = ...,
    stress_dir: str | Path = ...,
    steps: int | None = ...,
    next_inputs: Any = ...,
    static: bool = ...,
    assume: Sequence[str] = ...,
    ignore: Sequence[str] = ...,
    sweep: str | Mapping[str, Sequence[int]] = ...,
) -> Comparison: ...
def train(
    model: ModelLike,
    batches: Iterable[Inputs] | None = ...,
    *,
    source: SourceConfig | None = ...,
    config: TrainConfig | None = ...,
    session: Session = ...,
    steps: int = ...,
    policies: Rules | Sequence[Rules] = ...,
    dtype: str | torch.dtype = ...,
    loss_scale: str | float | None = ...,
    every: int = ...,
    device: str = ...,
    seed: int = ...,
    fail_on: Literal["error", "warning", "note", "never"] = ...,
    loss: Callable[..., Any] | None = ...,
    optimizer: Callable[..., Any] | None = ...,
    metric: Callable[..., Any] | None = ...,
) -> TrainingReport: ...
def tune(
    model: ModelLike,
    inputs: Inputs | None = ...,
    *,
    source: SourceConfig | None = ...,
    config: TuneConfig | None = ...,
    session: Session = ...,
    min_sqnr: float | None = ...,
    metric_drop: float | None = ...,
    dtype: Literal["float16", "bfloat16", "auto"] = ...,
    cost: Literal["ops", "bytes", "time"] = ...,
    target: str | Device | None = ...,
    exhaustive: bool = ...,
    device: str = ...,
    seed: int = ...,
    twins: str | Path | None = ...,
) -> TuningReport: ...
def verify(
    directory: str | Path,
    *,
    config: VerifyConfig | None = ...,
    session: Session = ...,
    run: bool = ...,
    tolerance_db: float | None = ...,
) -> Verification: ...
