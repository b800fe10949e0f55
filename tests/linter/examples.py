"""Bad and good examples of every lint rule, correct training loops, and shortcuts to lint them."""

from __future__ import annotations

import json

from ampaudit.findings.pages import all_pages
from ampaudit.findings.pages.page import LINTED
from ampaudit.linter.linting import LintedFile, lint_text
from ampaudit.linter.selection import RuleSelection
from tests.linter.corpora import read_set
from tests.linter.field_twins import FIELD_TWINS
from tests.linter.twins import TWINS as OLDER_TWINS
from tests.linter.twins import script

TWINS = OLDER_TWINS | FIELD_TWINS
PAGES = {code: page for code, page in all_pages().items() if code.startswith(LINTED)}
# a fix may only be offered where it was thought through
FIXABLE = frozenset(
    "AMP802 AMP803 AMP804 AMP807 AMP809 AMP817 AMP818 AMP820 AMP840 AMP844 AMP850 AMP860".split()
)
CORRECT = read_set("correct-styles")
BAD = {code: page.bad.code for code, page in PAGES.items()} | {
    f"{code} again": script(template, bad) for code, (template, bad, _) in TWINS.items()
}
# where the dtype is not known, nothing is reported
UNSURE = BAD["AMP861"].replace('with torch.autocast("cuda", dtype=torch.float16):', "if self.training:")
GOOD = {code: page.good.code for code, page in PAGES.items()} | {
    f"{code} again": script(template, good) for code, (template, _, good) in TWINS.items()
}


def lint(text: str, name: str = "train.py", *, fix: bool = False, unsafe: bool = False) -> LintedFile:
    return lint_text(text, name, RuleSelection(unsafe_fixes=unsafe), fix=fix)


def codes(text: str, name: str = "train.py") -> list[str]:
    linted = lint(text, name)
    assert not linted.unread, linted.unread
    return [finding.code for finding in linted.findings if finding.suppressed is None]


# the loop over batches of a function with a model, its optimizer and a scaler
SCALED_STEPS = """    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(x).mean()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""
_LOOP = """
import torch


def train(model, loader, optimizer, criterion{arguments}):
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
{body}
"""


def training_loop(body: str, arguments: str = "") -> str:
    lines = "\n".join(f"        {line}" for line in body.split("\n"))
    return _LOOP.format(arguments=arguments, body=lines)


def notebook(*cells: str, language: str = "python", indent: int = 1) -> str:
    made = [
        {"cell_type": "markdown", "metadata": {}, "source": ["# Training\n"]},
        *(
            {
                "cell_type": "code",
                "execution_count": 3,
                "metadata": {},
                "outputs": [{"data": "é"}],
                "source": c.splitlines(True),
            }
            for c in cells
        ),
    ]
    whole = {
        "cells": made,
        "metadata": {"language_info": {"name": language}},
        "nbformat": 4,
        "nbformat_minor": 5,
    }
    return json.dumps(whole, indent=indent, ensure_ascii=False) + "\n"
