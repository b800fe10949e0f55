"""The formats that ampaudit reads: honest inputs of each, how they are mutated, and what reads them."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from random import Random

from ampaudit.ci.check import BaselineFile
from ampaudit.ci.config import read_config
from ampaudit.ci.judge import judge as judge_report
from ampaudit.ci.judge import measured_in
from ampaudit.cli.program import main
from ampaudit.render.render import OUTPUT_FORMATS
from ampaudit.report.check import Budgets
from ampaudit.source.inputs import recorded_calls
from tests.fuzz import honest
from tests.fuzz.containers import as_pickle, as_safetensors, as_zip
from tests.fuzz.judge import Verdict, judge
from tests.fuzz.mutators import Files, FolderMutator, as_bytes, as_encoded, as_json, as_text, folder, one_of
from tests.support.recorded import Sink
from tests.support.saved import saved_report

Reader = Callable[[], tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Format:
    """A format.

    Attributes:
        name: in options and results.
        honest: the inputs that mutation starts from.
        mutate: changes one of them.
        readers: what may read it; one is chosen for each input.
        share: how many of 2,000 inputs are of this format.
    """

    name: str
    honest: Callable[[], list[Files]]
    mutate: FolderMutator
    readers: tuple[Reader, ...]
    share: int


def command(*words: str) -> Reader:
    """Run a command in this process; raise what ends it."""

    def read() -> tuple[str, int]:
        out = io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(out):
            code = main.main(list(words), standalone_mode=False)
        if code == 3:  # a check raised and was reported as a finding
            raise AssertionError(f"exit code 3: {out.getvalue()[-200:]}")
        return out.getvalue(), code or 0

    return read


_audited = cache(saved_report)


def _baseline() -> tuple[str, int]:
    report, budgets = _audited(), Budgets(min_headroom=1.0, min_sqnr=20.0, max_fp32_share=0.5)
    entries = BaselineFile(Path("baseline.json"), update=False).entries("model.py")
    return str([judge_report(report, measured_in(report), budgets, entry) for entry in entries]), 0


def _arguments() -> tuple[str, int]:
    batches, info = recorded_calls(Path("calls"), None, Sink())
    return f"{info} {[batch.name for batch in batches]}", 0


def _check_options() -> tuple[str, int]:
    return str(read_config(Path("pyproject.toml"))), 0


_PT2 = as_zip(
    {
        "*.json": as_json,
        "*.pt": as_zip({"*.pkl": as_pickle}),
        "*": as_bytes,
    }
)
_PT = one_of((4, as_zip({"*.pkl": as_pickle})), (4, as_pickle), (1, as_bytes))
_TEXT = (
    *"```python|%%time|!ls|async def f(:|scaler.step(o)".split("|"),
    *"\f|\fclass A(:|f'{x|'''|x = \\|@|match x:|    case|*a, = |(yield)|lambda: (|else:|\x1b[31m".split("|"),
    *"with a as b, (c:|print(x|] = 1|\ufeffx = 1|def f(x, /, *, ):|try:|import (|x: int =".split("|"),
    "x = " + "(" * 300,
    "lambda: " * 300,
)
_YAML = (
    "extends: [rules]",
    "- &a [*a]",
    "!!python/object/apply:os.system ['id']",
    "? {a: b}",
    "---",
    "\t- x",
)
_TOML = (
    "[tool.ampaudit]",
    "[[tool.ampaudit]]",
    "batches = 1e999",
    "min-sqnr = nan",
    "trust = true",
    "a.b = {}",
    *(
        'targets = ["/m/*.py"]',
        'targets = ["**", "/"]',
        'targets = ["~/[", "..\\\\*"]',
        'exclude = ["/*", "["]',
    ),
)
_JSON = one_of((8, as_json), (1, as_bytes))

FORMATS = {
    made.name: made
    for made in (
        Format(
            "pt2",
            honest.exported,
            folder({"*.pt2": _PT2}),
            (command("scan", "m.pt2"), command("plan", "m.pt2"), command("convert", "m.pt2", "-o", "out")),
            200,
        ),
        Format(
            "onnx",
            honest.graphs,
            folder({"*": as_bytes}),
            (command("scan", "m.onnx"), command("plan", "m.onnx")),
            100,
        ),
        Format(
            "pt", honest.checkpoints, folder({"*.pt": _PT}), (command("convert", "m.pt", "-o", "out"),), 290
        ),
        Format(
            "safetensors",
            honest.safetensors_files,
            folder({"*": as_safetensors}),
            (command("convert", "m.safetensors", "-o", "out"),),
            200,
        ),
        Format(
            "index",
            honest.shards,
            folder({"*.index.json": _JSON, "*.safetensors": as_safetensors}),
            (command("convert", "model.safetensors.index.json", "-o", "out"),),
            150,
        ),
        Format(
            "huggingface",
            honest.huggingface,
            folder({"*.json": _JSON, "*.safetensors": as_safetensors}),
            (command("scan", "d"), command("scan", "d", "--stream")),
            10,  # a configuration is read in a process of its own, which takes seconds
        ),
        Format(
            "converted",
            honest.converted,
            folder(
                {"*.json": _JSON, "*.yaml": as_text(*_YAML), "*.pt2": _PT2, "*.safetensors": as_safetensors}
            ),
            (
                command("verify", "d", "--no-run"),
                command("convert", "d", "--to", "float32", "-o", "out"),
                command("scan", "d"),
                command("report", "d"),
            ),
            150,
        ),
        Format(
            "rules",
            honest.rule_files,
            folder({"*": one_of((5, as_text(*_YAML)), (1, as_bytes))}),
            (
                command("rules", "validate", "rules.yaml"),
                command("rules", "show", "rules.yaml"),
                command("rules", "diff", "rules.yaml", "torch-cuda"),
            ),
            100,
        ),
        Format(
            "report",
            honest.reports,
            folder({"*": _JSON}),
            (
                *(command("report", "report.json", "--format", form) for form in OUTPUT_FORMATS),
                command("report", "report.json", "-v"),
                command("diff", "report.json", "report.json"),
            ),
            150,
        ),
        Format("baseline", honest.baselines, folder({"*": _JSON}), (_baseline,), 50),
        Format(
            "pyproject",
            honest.configurations,
            folder({"*.toml": one_of((5, as_text(*_TOML)), (1, as_bytes))}),
            (command("lint", "train.py"), _check_options),
            150,
        ),
        Format(
            "script",
            honest.scripts,
            folder({"*": one_of((6, as_text(*_TEXT)), (1, as_bytes), (1, as_encoded))}),
            (
                command("lint", "."),
                command("init", "--force"),
                command("lint", ".", "--fix"),
                command("lint", ".", "--diff"),
                command("lint", ".", "--format", "sarif"),
            ),
            100,
        ),
        Format(
            "notebook",
            honest.notebooks,
            folder({"*": _JSON}),
            (command("lint", "train.ipynb"), command("lint", "train.ipynb", "--fix")),
            50,
        ),
        Format(
            "recording",
            honest.recordings,
            folder({"*.json": _JSON, "*.safetensors": as_safetensors}),
            (
                command("scan", "tests.fuzz.honest:get_model", "--inputs", "calls"),
                command("plan", "tests.fuzz.honest:get_model", "--inputs", "calls"),
            ),
            100,
        ),
        Format(
            "arguments",
            honest.recorded_arguments,
            folder({"*/call-*.json": _JSON, "*.safetensors": as_safetensors}),
            (_arguments,),
            100,
        ),
        Format(
            "inputs",
            honest.inputs,
            folder({"*": as_safetensors}),
            (command("scan", "tests.fuzz.honest:get_model", "--inputs", "inputs.safetensors"),),
            100,
        ),
    )
}


def mutated(form: Format, random: Random) -> tuple[Files, Reader]:
    """Return a mutated input of a format, and what shall read it."""
    files = form.mutate(random, random.choice(form.honest()))
    return files, random.choice(form.readers)


def judged(form: Format, random: Random, keep: Path | None = None) -> Verdict:
    """Mutate an input of a format and judge what reads it."""
    files, read = mutated(form, random)
    return judge(files, read, keep=keep)
