"""What an audit says about each op, as short texts for the metadata of an ONNX file."""

from __future__ import annotations

from torch.export import ExportedProgram

from ampaudit.core.text import escape_control, format_number
from ampaudit.export.fold import FoldedGraph
from ampaudit.export.program import same_nodes
from ampaudit.report.model import Report
from ampaudit.report.site import SiteReport
from ampaudit.trace.graph import TracedModel

__all__ = ["about_report", "onnx_notes"]


def onnx_notes(
    report: Report, traced: TracedModel, deployed: FoldedGraph, program: ExportedProgram
) -> dict[str, dict[str, str]]:
    """Notes by the name of the program's node."""
    sites = {site.site: site for site in report.sites}
    codes = report.codes_by_site
    found: dict[str, dict[str, str]] = {}
    for ours, theirs in same_nodes(deployed.graph, program.graph):
        site = traced.site_of_node.get(ours.name)
        if site is not None and site.id in sites:
            found[theirs.name] = _notes(sites[site.id], codes[site.id])
    return found


def about_report(report: Report) -> dict[str, str]:
    """The same for the whole model."""
    least = report.least_headroom
    said = {
        "version": report.tool.version,
        "policy": escape_control(report.run.policy),
        "dtype": report.run.dtype,
        "verdict": report.verdict,
        "batches": str(report.run.batches),
    }
    if least is not None:
        said["least_headroom"] = f"{least.headroom_bits:.1f} bits at {escape_control(least.site)}"
    return said


def _notes(site: SiteReport, codes: list[str]) -> dict[str, str]:
    said = {
        "site": escape_control(site.site),
        "precision": site.precision,
        "rule": escape_control(site.rule or ""),
        "why": escape_control(site.why),
        "verdict": site.verdict,
        "findings": " ".join(codes),
    }
    seen = site.forward
    if seen is not None:
        said["peak"] = format_number(seen.peak)
        said["headroom"] = f"{seen.headroom_bits:.1f} bits" if seen.headroom_bits is not None else ""
        said["accuracy"] = f"{seen.sqnr_db:.0f} dB" if seen.sqnr_db is not None else "exact"
    if site.bound is not None:
        said["proved_below"] = format_number(site.bound)
    return {key: text for key, text in said.items() if text}
