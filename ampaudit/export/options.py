"""The options of a conversion, as one value."""

from __future__ import annotations

from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path

from ampaudit.checkpoint.layout import MANIFEST
from ampaudit.core.errors import UsageError
from ampaudit.core.files import check_directory
from ampaudit.export.storage import Mode
from ampaudit.policy import RuleSet, load_policy

__all__ = ["ConvertOptions"]


@dataclass(frozen=True, slots=True)
class ConvertOptions:
    """How to convert.

    Attributes:
        policy: name, path or rule set.
        dtype: ``float16`` or ``bfloat16``.
        mode: ``inference`` folds casts into the stored weights; ``train`` leaves them in the graph, over
            FP32 masters.
        masters: keep what is rounded, so that ``--to float32`` restores it.
        program: write ``model.pt2``.
        onnx: write ``model.onnx``.
        force: replace a directory that an earlier conversion wrote.
        weights: the checkpoint that was loaded into the model, if its tensors are to be read from there.
    """

    policy: str | RuleSet = "ampaudit"
    dtype: str = "float16"
    mode: Mode = "inference"
    masters: bool = True
    program: bool = True
    onnx: bool = False
    force: bool = False
    weights: Path | None = None

    def check(self, output: Path) -> None:
        """Refuse early what would fail after a long run.

        Raises:
            UsageError, OutputError: options that contradict each other; an output that may not be written.
        """
        check_directory(output, force=self.force, ours=MANIFEST)
        if self.mode == "train" and not self.masters:
            raise UsageError("--mode train trains the masters", hint="leave out --no-masters")
        if self.onnx:
            if not self.program:
                raise UsageError("--onnx is made from the program", hint="leave out --no-program")
            _check_onnx_installed()

    def loaded(self) -> ConvertOptions:
        """The same with the policy as a rule set, so that its file is read once."""
        return replace(self, policy=self.rules)

    @property
    def rules(self) -> RuleSet:
        """The policy, loaded."""
        return self.policy if isinstance(self.policy, RuleSet) else load_policy(self.policy)


def _check_onnx_installed() -> None:
    """Refuse early what would fail after a long run.

    Raises:
        UsageError: a package is missing.
    """
    missing = [name for name in ("onnx", "onnxscript", "onnxruntime") if find_spec(name) is None]
    if missing:
        raise UsageError(f"--onnx needs {', '.join(missing)}", hint="pip install 'ampaudit[onnx]'")
