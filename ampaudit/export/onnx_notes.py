"""Precision notes on the nodes of an ONNX file, where viewers such as Netron show them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from torch import fx
from torch.export import ExportedProgram

__all__ = ["PREFIX", "Notes", "annotate", "mark_nodes"]

PREFIX = "ampaudit."
_KEY = "ampaudit_node"
_NODE = re.compile(r"^%(?P<name>[\w.]+)\s*:")
Notes = Mapping[str, Mapping[str, str]]


def mark_nodes(program: ExportedProgram, notes: Notes) -> None:
    """Mark the nodes that there are notes about; the mark survives the exporter's decompositions.

    Names do not: a new node may be given the name that another one had.
    """
    for node in program.graph.nodes:
        if node.name in notes:
            node.meta["custom"] = {**node.meta.get("custom", {}), _KEY: node.name}


def annotate(exported: Any, notes: Notes, about: Mapping[str, str]) -> None:
    """Write notes into the metadata of an exported ONNX program's nodes, and some about the whole.

    Args:
        exported: what ``torch.onnx.export`` returned for a ``mark_nodes`` program.
        notes: by the name of the program's node.
        about: the whole model.
    """
    sources = _sources(exported.exported_program.graph) if exported.exported_program is not None else {}
    for node in exported.model.graph.all_nodes():
        found = _NODE.match(node.metadata_props.get("pkg.torch.onnx.fx_node", ""))
        source = sources.get(found["name"]) if found is not None else None
        if source is not None and source in notes:
            node.metadata_props.update({f"{PREFIX}{key}": text for key, text in notes[source].items()})
    exported.model.metadata_props.update({f"{PREFIX}{key}": text for key, text in about.items()})


def _sources(graph: fx.Graph) -> dict[str, str]:
    """For each node of the decomposed program, the marked node that it comes from."""
    marks = ((node.name, node.meta.get("custom", {}).get(_KEY)) for node in graph.nodes)
    return {name: mark for name, mark in marks if mark is not None}
