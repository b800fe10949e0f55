"""Reports as they were saved by real runs, for everything that only renders them.

``python -m tests.support.saved`` makes them again; paths are made relative, so that they read the same
anywhere.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from ampaudit.findings.finding import Finding, Severity
from ampaudit.report.compare import diff
from ampaudit.report.conversion import Conversion, OutputRecord, Problem, Verification
from ampaudit.report.difference import Differences
from ampaudit.report.documents import Document, parse_document
from ampaudit.report.lint import LintFinding, LintReport, UnreadFile
from ampaudit.report.model import Comparison, Report, SiteReport
from tests.support.paths import ROOT
from tests.support.tuned import SENSITIVITY, tuned

PLACE = ROOT / "tests" / "data" / "reports"
COMMANDS = {
    "overflow": ("scan", "examples/t5_feed_forward.py", "--policy", "torch-cuda", "--advise", "--prove"),
    "policies": ("scan", "examples/t5_feed_forward.py", "--policy", "torch-cuda,half,ampaudit"),
    "gradients": ("scan", "examples/training/digits.py", "--backward"),
    "static": ("scan", "examples/t5_feed_forward.py", "--static"),
    "sweep": (
        *("scan", "examples/mean_pooling.py", "--policy", "half"),
        *("--sweep", "length=64,256,1024,4096"),
    ),
    "ranges": ("scan", "examples/t5_feed_forward.py", "--ranges"),
    "training": ("train", "examples/training/digits.py", "--steps", "30", "--policy", "apex-o3"),
    "check": (
        "check",
        "examples/t5_feed_forward.py",
        "examples/ci/model.py",
        "missing.py",
        "--policy",
        "torch-cuda",
    ),
    "bench": (
        *(
            "bench",
            "examples/training/text.py",
            "--train",
            "--modes",
            "fp32,tf32,bf16,converted",
            "--for",
            "v100",
        ),
        *("--batch-size", "4,16", "--repeats", "3"),
    ),
    "plan": ("plan", "examples/t5_feed_forward.py"),
}
NAMES = tuple(COMMANDS)
HOSTILE = (
    "</script><script>window.pwned=1</script>",
    '"><img src=x onerror="window.pwned=1">',
    "a' onclick='window.pwned=1",
    "{{ 7*7 }}{% raw %}",
    "\x1b[31mred\x1b[0m\x07\r\n::error::pwned",
    "🙂 ünïcödé 漢字 ‮right-to-left",
    "|pipe| `tick` [link](http://example.com) <b> @somebody #1 **bold** _it_",
    "=cmd|'/c calc'!A1",
    "x" * 500,
    "a\x00b\ud800c",
    "]]><!--",
)


def text_of(name: str) -> str:
    return (PLACE / f"{name}.json").read_text(encoding="utf-8")


def saved(name: str) -> Document:
    return parse_document(text_of(name), name)


def saved_report(name: str = "overflow") -> Report:
    found = saved(name)
    report = found.reports[0] if isinstance(found, Comparison) else found
    assert isinstance(report, Report)
    return report


def _scanned() -> Report:
    return replace(saved_report(), sweep=saved_report("sweep").sweep, sections={"sensitivity": SENSITIVITY})


def _linted() -> LintReport:
    finding = LintFinding(
        code="AMP803",
        severity=Severity.ERROR,
        file="train.py",
        line=7,
        column=5,
        end_line=7,
        end_column=19,
        cell=None,
        function="train",
        cause="gradients are clipped while they are scaled",
        advice="call scaler.unscale_(optimizer) first",
        fixable=True,
        source="    clip(model.parameters())",
    )
    return LintReport(
        1, "0.1.0", "fail", "fail", "warning", 2, (finding,), (UnreadFile("old.py", 1, "not valid Python"),)
    )


def _converted() -> Conversion:
    return Conversion(
        source="model.py",
        output="out",
        policy="ampaudit",
        dtype="float16",
        mode="inference",
        verdict="pass",
        exit_code=0,
        bytes_before=4000,
        bytes_after=2400,
        stored={"F16": 3, "F32": 1},
        kept={"rule ampaudit/norm": (1, 400, "norm.weight")},
        overflow={},
        broken={"old.mask": 4},
        masters=True,
        outputs=(OutputRecord("output", "float16", "00", 0.01, 63.0),),
        onnx_casts=1,
        onnx_error=None,
        files={"model.safetensors": 2400, "config.json": 20},
        notes=("a note",),
    )


def _verified() -> Verification:
    problem = Problem("changed", "model.safetensors", "its hash is another")
    return Verification("out", 3, 2400, 4, 4, (problem,), ("output: exactly as recorded",), ())


def _compared() -> Differences:
    policies = saved("policies")
    assert isinstance(policies, Comparison)
    return diff(policies.reports[2], policies.reports[0])


# one document of each kind
SAMPLES: dict[str, Callable[[], Document]] = {
    "scan": _scanned,
    "comparison": partial(saved, "policies"),
    "plan": partial(saved, "plan"),
    "conversion": _converted,
    "verification": _verified,
    "check": partial(saved, "check"),
    "training": partial(saved, "training"),
    "tuning": tuned,
    "bench": partial(saved, "bench"),
    "lint": _linted,
    "diff": _compared,
}


def sample(kind: str) -> Document:
    return SAMPLES[kind]()


def named(report: Report, name: str) -> Report:
    """The same report about a model whose author chose this name for everything."""

    def finding(found: Finding) -> Finding:
        source = replace(found.source, file=name, code=name) if found.source is not None else None
        changed = {
            "layer": name,
            "site": f"{name}/op",
            "op": name,
            "cause": name,
            "advice": name,
            "source": source,
        }
        tried = tuple(replace(t, change=name, paste=name, before=name, after=name) for t in found.tried)
        return replace(found, **changed, poisons=(name, name), tried=tried)

    def site(found: SiteReport) -> SiteReport:
        source = replace(found.source, file=name, code=name) if found.source is not None else None
        return replace(found, site=f"{name}/{found.op}", layer=name, layer_type=name, why=name, source=source)

    return replace(
        report,
        model=replace(report.model, source=name),
        findings=tuple(map(finding, report.findings)),
        sites=tuple(map(site, report.sites)),
        notes=(name,),
    )


def _relative(text: str) -> str:
    text = text.replace(f"{ROOT}/", "")
    return re.sub(r'"[^"]*site-packages/', '"lib/site-packages/', text)


def main() -> None:
    PLACE.mkdir(parents=True, exist_ok=True)
    for name, command in COMMANDS.items():
        arguments = [sys.executable, "-m", "ampaudit", *command, "--format", "json"]
        done = subprocess.run(arguments, cwd=ROOT, capture_output=True, text=True, check=False)
        if not done.stdout:
            raise SystemExit(f"{name}: {done.stderr}")
        (PLACE / f"{name}.json").write_text(_relative(done.stdout), encoding="utf-8")


if __name__ == "__main__":
    main()
