"""Compares native verdicts on a GPU with emulated ones, for each reported failure and its twin.

    python -m benchmarks.gpu_verdicts [--device cuda] [--json FILE]

Scans each model twice: on the device with its own 16-bit kernels, and emulated on the CPU. Compares the
verdicts of sites, and the codes and layers of findings; lists each difference.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from typing import Any

import torch

import ampaudit
from ampaudit.report.model import Report
from benchmarks.options import parser
from tests.support.models import CASES, COMBINATIONS
from tests.support.models.case import Case


def audit(case: Case, failing: bool, combination: str, device: str) -> Report:
    policy, dtype = COMBINATIONS[combination]
    torch.manual_seed(11)
    model, inputs = case.build(failing)
    return ampaudit.scan(model.eval(), inputs, policy=policy, dtype=dtype, device=device)


def findings(report: Report) -> set[tuple[str, str]]:
    return {(f.code, f.layer) for f in report.findings if f.severity != "note"}


def compare(native: Report, emulated: Report) -> dict[str, Any]:
    """Return the number of sites, those with another verdict, and the findings of only one report."""
    sites = {s.site: s.verdict for s in emulated.sites}
    differing = [
        {"site": str(s.site), "native": s.verdict, "emulated": sites.get(s.site, "absent")}
        for s in native.sites
        if sites.get(s.site) != s.verdict
    ]
    return {
        "sites": len(native.sites),
        "differing": differing,
        "native_alone": sorted(findings(native) - findings(emulated)),
        "emulated_alone": sorted(findings(emulated) - findings(native)),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__)
    here = "cuda" if torch.cuda.is_available() else "cpu"
    words.add_argument("--device", choices=["cpu", "cuda"], default=here)
    words.add_argument("--seconds", type=float, default=220.0, help="start no comparison after this time")
    options = words.parse_args(arguments)
    started = time.perf_counter()
    results: dict[str, Any] = {"compared": 0, "sites": 0, "differing_sites": 0, "left_out": 0, "models": {}}
    for case in list(CASES.values())[: 1 if options.smoke else None]:
        for combination in COMBINATIONS:
            for failing in (True,) if options.smoke else (True, False):
                if time.perf_counter() - started > options.seconds:
                    results["left_out"] += 1
                    continue
                name = f"{case.name}, {combination}, {'failing' if failing else 'healthy'}"
                native, emulated = (audit(case, failing, combination, d) for d in (options.device, "cpu"))
                found = compare(native, emulated)
                found["backend"] = native.run.backend
                results["compared"] += 1
                results["sites"] += found["sites"]
                results["differing_sites"] += len(found["differing"])
                if found["differing"] or found["native_alone"] or found["emulated_alone"]:
                    results["models"][name] = found
                    print(name, json.dumps(found))
    results["seconds"] = round(time.perf_counter() - started, 1)
    print(
        f"{results['compared']} pairs of audits ({results['left_out']} left out), {results['sites']} sites, "
        f"{results['differing_sites']} with another verdict, in {results['seconds']} s"
    )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
