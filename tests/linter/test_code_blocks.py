"""Notebooks and Markdown: locations, magic commands, broken cells, fixes."""

from __future__ import annotations

import json

import pytest

from tests.linter.examples import lint, notebook

SETUP = (
    "%matplotlib inline\n!pip install torch\n!python train.py \\\n    --epochs 3 \\\n  --fp16\n"
    "files = !ls\nimport torch\n"
    "scaler = torch.amp.GradScaler('cuda')\n"
)
CELL = (
    "%%time\nfor x, y in loader:\n    loss = criterion(model(x), y)\n"
    "    loss.backward()\n    scaler.step(optimizer)\n    scaler.update()\n    optimizer.zero_grad()"
)


@pytest.mark.parametrize("indent", [1, 2, 4])
def test_a_notebook_is_one_script_and_findings_are_in_cells(indent: int) -> None:
    text = notebook(SETUP, "%%bash\nls *\n", "display(model)\nmodel?\n", CELL, indent=indent)
    linted = lint(text, "train.ipynb")
    (finding,) = linted.findings
    assert (finding.code, finding.cell, finding.line) == ("AMP802", 5, 4)
    fixed = lint(text, "train.ipynb", fix=True)
    cells = json.loads(fixed.after)["cells"]
    assert "".join(cells[4]["source"]) == CELL.replace("loss.backward()", "scaler.scale(loss).backward()")
    assert fixed.after == text.replace('"    loss.backward()\\n"', '"    scaler.scale(loss).backward()\\n"')
    assert not lint(fixed.after, "train.ipynb").findings


def test_a_broken_cell_is_named_and_the_others_go_on() -> None:
    linted = lint(notebook(SETUP, "this is broken python\n", CELL), "train.ipynb")
    assert [(f.code, f.cell) for f in linted.findings] == [("AMP802", 4)]
    (unread,) = linted.unread
    assert unread.reason.startswith("cell 3: not valid Python")
    assert lint(notebook(CELL, language="julia"), "x.ipynb").findings == []
    assert "not a notebook" in lint('{"a": 1}', "x.ipynb").unread[0].reason


def test_code_blocks_of_markdown() -> None:
    text = (
        "# Mixed precision\n\n```python\nfrom torch.cuda.amp import GradScaler as Scaler\n```\n\n"
        "1. then\n\n   ```py\n   scaler = Scaler()\n   for x in data:\n       loss = model(x).sum()\n"
        "       scaler.scale(loss).backward()\n       optimizer.step()\n       scaler.update()\n"
        "       optimizer.zero_grad()\n   ```\n\n"
        "```bash\nmake\n```\n\n```python\nnot python at all ...\n```\n"
    )
    linted = lint(text, "README.md")
    assert not linted.unread
    assert [(f.code, f.line, f.column) for f in linted.findings] == [("AMP803", 14, 8)]
    fixed = lint(text, "README.md", fix=True)
    assert "       scaler.step(optimizer)\n" in fixed.after
    assert fixed.after.replace("scaler.step(optimizer)", "optimizer.step()").count("\n") == text.count("\n")
