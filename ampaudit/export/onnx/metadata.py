"""Writes audit results into the metadata of an ONNX file, where viewers such as Netron show them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import fx
from torch.export import ExportedProgram

from ampaudit.core.text import escape_control, format_number
from ampaudit.export.fold import FoldedGraph
from ampaudit.export.program import same_nodes
from ampaudit.report.model import Report
from ampaudit.report.site import SiteReport
from ampaudit.source.onnx.names import NodeNames
from ampaudit.trace.graph import TracedModel

if TYPE_CHECKING:
    import onnx_ir as ir

__all__ = ["PREFIX", "OnnxMetadata", "annotate_graph", "metadata_of"]

PREFIX = "ampaudit."
_KEY = "ampaudit_node"
_NODE = re.compile(r"^%(?P<name>[\w.]+)\s*:")


@dataclass(frozen=True, slots=True)
class OnnxMetadata:
    """Short texts by key, for each node by its name in the program and for the whole model."""

    nodes: Mapping[str, Mapping[str, str]]
    model: Mapping[str, str]

    def mark_nodes(self, program: ExportedProgram) -> None:
        """Mark the nodes that have metadata; marks survive the exporter's decompositions.

        Names do not: a new node may be given the name that another one had.
        """
        for node in program.graph.nodes:
            if node.name in self.nodes:
                node.meta["custom"] = {**node.meta.get("custom", {}), _KEY: node.name}

    def annotate(self, exported: Any) -> None:
        """Write the metadata into the ONNX export of a program with marked nodes."""
        origins = _origins(exported.exported_program.graph) if exported.exported_program is not None else {}
        for node in exported.model.graph.all_nodes():
            match = _NODE.match(node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
            origin = origins.get(match["name"]) if match is not None else None
            if origin is not None and origin in self.nodes:
                node.metadata_props.update(_prefixed(self.nodes[origin]))
        exported.model.metadata_props.update(_prefixed(self.model))


def annotate_graph(model: ir.Model, report: Report, names: NodeNames) -> None:
    """Write a report's entries into the audited graph; each node gets the entry of its first op."""
    first: dict[str, SiteReport] = {}
    for site in report.sites:
        first.setdefault(site.layer, site)
    codes = report.codes_by_site
    for node in model.graph.all_nodes():
        entry = first.get(names.of(node))
        if entry is not None:
            node.metadata_props.update(_prefixed(_about_site(entry, codes[entry.site])))
    model.metadata_props.update(_prefixed(_about_model(report)))


def _origins(graph: fx.Graph) -> dict[str, str]:
    """Map each node of the decomposed program to the marked node that it comes from."""
    marks = ((node.name, node.meta.get("custom", {}).get(_KEY)) for node in graph.nodes)
    return {name: mark for name, mark in marks if mark is not None}


def _prefixed(texts: Mapping[str, str]) -> dict[str, str]:
    return {f"{PREFIX}{key}": text for key, text in texts.items()}


def metadata_of(
    report: Report, traced: TracedModel, folded: FoldedGraph, program: ExportedProgram
) -> OnnxMetadata:
    """Collect a report's entries for the model and for the ops of its program."""
    sites = {site.site: site for site in report.sites}
    codes = report.codes_by_site
    nodes: dict[str, dict[str, str]] = {}
    for ours, theirs in same_nodes(folded.graph, program.graph):
        site = traced.site_of_node.get(ours.name)
        if site is not None and site.id in sites:
            nodes[theirs.name] = _about_site(sites[site.id], codes[site.id])
    return OnnxMetadata(nodes, _about_model(report))


def _about_model(report: Report) -> dict[str, str]:
    least = report.least_headroom
    texts = {
        "version": report.tool.version,
        "policy": escape_control(report.run.policy),
        "dtype": report.run.dtype,
        "verdict": report.verdict,
        "batches": str(report.run.batches),
    }
    if least is not None:
        texts["least_headroom"] = f"{least.headroom_bits:.1f} bits at {escape_control(least.site)}"
    return texts


def _about_site(site: SiteReport, codes: list[str]) -> dict[str, str]:
    texts = {
        "site": escape_control(site.site),
        "precision": site.precision,
        "rule": escape_control(site.rule or ""),
        "why": escape_control(site.why),
        "verdict": site.verdict,
        "findings": " ".join(codes),
    }
    forward = site.forward
    if forward is not None:
        texts["peak"] = format_number(forward.peak)
        texts["headroom"] = f"{forward.headroom_bits:.1f} bits" if forward.headroom_bits is not None else ""
        texts["accuracy"] = f"{forward.sqnr_db:.0f} dB" if forward.sqnr_db is not None else "exact"
    if site.bound is not None:
        texts["proved_below"] = format_number(site.bound)
    return {key: text for key, text in texts.items() if text}
