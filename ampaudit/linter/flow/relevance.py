"""Finds the scripts and lines that matter for the precision of a training loop."""

from __future__ import annotations

from typing import Any, Final

import re2

from ampaudit.linter.source_text import split_lines

__all__ = ["MATTERS", "MATTERS_TO_IMPORTERS", "is_worth_reading", "matching_lines"]

# lines that matter for the precision of a training loop
MATTERS: Final = re2.compile(
    r"autocast|[Ss]caler|\bscale|backward|\bhalf\b|float16|\.float\(|\.step\b|zero_grad|\bgrad\b|clip_grad|\.update\("
    r"|precision|torch\.save|log_softmax|logsumexp|parameters\(|\.mul_\(|lerp_|masked_fill|\d[eE]-?\d|BCELoss|binary_cross|\bamp\b|no_sync|DataParallel|state_dict|autograd|\bitem\("
    r"|Function|optim|retain_graph|no_grad|inference_mode|\beval\(|\btrain\(|-\d{5,}|inf\b"
)
# and those that matter for a loop in another file
MATTERS_TO_IMPORTERS: Final = re2.compile(
    r"autocast|[Ss]caler|\.scale\(|backward|\bhalf\(|float16|\.step\(|zero_grad|\.grad\b|clip_grad|\bamp\b|no_sync"
    r"|DataParallel|state_dict|optim|parameters\(|\.mul_\(|lerp_"
)
# files that rules may have something to report in
_MENTIONS = re2.compile(
    r"autocast|GradScaler|unscale_|\bapex\b|half\(|float16|\.amp\b|import amp\b|masked_fill"
    r"|\.scale\(|scaler|-\d+(?:\.\d*)?[eE]\d|-\d{5,}|\d[eE]-|retain_graph|no_sync|autograd\.Function"
    r"|Accelerator|deepspeed|[Ff]abric|precision=|fp16=|amp_mode|_step_amp|FullySharded"
)


def matching_lines(pattern: Any, text: str) -> list[int]:
    """Return the numbers of the lines in which an RE2 pattern matches."""
    if "\r" in text:
        return [number for number, line in enumerate(split_lines(text), 1) if pattern.search(line)]
    lines: list[int] = []
    line, last = 1, 0
    for match in pattern.finditer(text):
        line += text.count("\n", last, match.start())
        last = match.start()
        if not lines or lines[-1] != line:
            lines.append(line)
    return lines


def is_worth_reading(text: str) -> bool:
    """Return whether a script contains any word that a rule is about; most files of a project do not."""
    return _MENTIONS.search(text) is not None
