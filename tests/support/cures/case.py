"""What a case of the table is: a model's source, and what may be proposed for it."""

from __future__ import annotations

from dataclasses import dataclass, field
from textwrap import dedent, indent

Change = tuple[tuple[str, str], ...]  # pieces of the source and what stands there afterwards

_FILE = """\
import math

import torch
import torch.nn.functional as F
from torch import nn


class Model(nn.Module):
    def __init__(self):
        super().__init__()
{init}

    def forward(self, {arguments}):
{body}


def get_model():
    return Model().eval()


def batches():
    for number in range({count}):
        yield {inputs}
"""


@dataclass(frozen=True)
class Case:
    """A small model with one fault, and the proposals that are expected.

    Attributes:
        name: a few words.
        body: of ``forward``.
        init: of ``__init__``, after ``super()``.
        inputs: an expression; ``number`` is that of the batch.
        rewrite: the change of the source that the rewrite means; ``None`` where none is safe.
        by_hand: whether the line is nobody's to rewrite but the author's: there is no diff.
        by_runs: whether it takes runs to see that no rewrite is safe: there is no proof about the values.
        kinds: other kinds of proposals that must be there.
        never: kinds that must not be there.
    """

    name: str
    body: str
    init: str = "self.inner = nn.Linear(16, 16)"
    inputs: str = "torch.randn(4, 16)"
    arguments: str = "x"
    rewrite: Change | None = None
    by_hand: bool = False
    by_runs: bool = False
    kinds: tuple[str, ...] = ()
    never: tuple[str, ...] = ()
    policy: str = "half"
    count: int = 1
    options: dict[str, object] = field(default_factory=dict)
    outcome: str = "cure"

    @property
    def source(self) -> str:
        """The file."""
        inner = " " * 8
        return _FILE.format(
            init=indent(dedent(self.init).strip(), inner),
            body=indent(dedent(self.body).strip(), inner),
            arguments=self.arguments,
            inputs=self.inputs,
            count=self.count,
        )

    @property
    def rewritten(self) -> str:
        """The file with the rewrite, made by hand."""
        text = self.source
        for old, new in self.rewrite or ():
            assert text.count(old) == 1, (self.name, old)
            text = text.replace(old, new)
        return text
