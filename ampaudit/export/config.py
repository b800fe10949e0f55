"""Options of ``convert`` and ``verify``."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal, Self

from annotated_types import Ge

from ampaudit.audit.config import (
    MIN_HEADROOM,
    MIN_SQNR,
    FailOnOption,
    Ignored,
    MinHeadroom,
    MinSqnr,
    PolicyConfig,
    rules_of,
)
from ampaudit.checkpoint import MANIFEST
from ampaudit.core.config import NOT_NAN, Config, FilePath, Option, Texts, python_only
from ampaudit.core.errors import UsageError
from ampaudit.core.files import check_directory
from ampaudit.policy import RuleSet

Mode = Literal["inference", "train"]  # casts folded into the weights; or masters, and casts in the graph


class ConvertConfig(PolicyConfig):
    """Options of ``convert``."""

    mode: Annotated[
        Mode, Option("Fold casts into the stored weights, or keep FP32 masters with casts in the graph.")
    ] = "inference"
    masters: Annotated[bool, Option("Do not keep the FP32 weights.", flags=("--no-masters",))] = True
    program: Annotated[bool, Option("Do not write model.pt2.", flags=("--no-program",))] = True
    onnx: Annotated[bool, Option("Also write model.onnx and compare it with torch.")] = False
    io: Annotated[
        Literal["float32", "float16", "bfloat16"],
        Option("Type of the floats that a converted .onnx takes and returns."),
    ] = "float32"
    tune: Annotated[
        float | None,
        NOT_NAN,
        Ge(0),
        Option("Keep the fewest ops in float32 that every output needs for this accuracy.", metavar="DB"),
    ] = None
    rescale: Annotated[
        bool,
        Option("Rescale overflowing residual streams by powers of two, where the graph proves it exact."),
    ] = False
    dynamic: Annotated[
        Texts,
        Option(
            "Dimensions of an input that may vary, by name; _ is fixed (repeatable).",
            metavar="INPUT=DIM[:LOW-HIGH],...",
        ),
    ] = ()
    fail_on: Annotated[
        FailOnOption,
        Option("Lowest severity at which nothing is written and the exit code is 1."),
    ] = "error"
    min_headroom: MinHeadroom = MIN_HEADROOM
    min_sqnr: MinSqnr = MIN_SQNR
    ignore: Ignored = ()
    force: Annotated[bool, Option("Replace DIR, if ampaudit wrote it.")] = False
    weights: Annotated[
        FilePath | None, python_only("Checkpoint to convert instead of the weights in the model.")
    ] = None

    def check_output(self, output: Path) -> None:
        """Check options and output before a long run.

        Raises:
            UsageError, OutputError: Options contradict each other, or the output may not be written.
        """
        self.check()
        if self.tune is not None and self.names_policy:
            raise UsageError("--tune chooses the policy", hint="leave out --policy or --tune")
        check_directory(output, force=self.force, marker=MANIFEST)
        if self.mode == "train" and not self.masters:
            raise UsageError("--mode train needs the masters", hint="leave out --no-masters")
        if self.onnx:
            if not self.program:
                raise UsageError("--onnx needs the program", hint="leave out --no-program")
            missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
            if missing:
                raise UsageError(f"--onnx needs {', '.join(missing)}", hint="pip install 'ampaudit[onnx]'")
        if self.dynamic and not self.program:
            raise UsageError("--dynamic needs the program", hint="leave out --no-program")

    def loaded(self) -> Self:
        """Return a copy with the policy as a rule set, so that its file is read once."""
        return self.changed(policy=self.rules)

    @property
    def names_policy(self) -> bool:
        """Whether the caller chose a policy."""
        return "policy" in self.model_fields_set

    @property
    def rules(self) -> RuleSet:
        """The loaded policy."""
        return rules_of(self.policy)


class VerifyConfig(Config):
    """Options of ``verify``."""

    run: Annotated[
        bool, Option("Only compare files; do not load and run the program.", flags=("--no-run",))
    ] = True
    tolerance_db: Annotated[
        float | None,
        NOT_NAN,
        Option(
            "Required agreement if bits differ.  [default: 40 for float16, 25 for bfloat16]",
            metavar="DB",
            flags=("--tolerance",),
        ),
    ] = None
