"""AMP903: parts of the model that no input has run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about, some_sites
from ampaudit.core.sites import SiteId
from ampaudit.core.text import plural
from ampaudit.report.finding import Finding
from ampaudit.report.gap import Gap, GapKind
from ampaudit.trace.graph import Slot

__all__ = ["CHECK", "modules_not_run"]


def modules_not_run(context: CheckContext) -> Gap | None:
    """Return the modules whose parameters no batch used, with their share of all parameters."""
    used, sizes = _parameters(context)
    idle = {name: size for name, size in sizes.items() if name not in used}
    modules = _whole_modules(idle, used)
    if not modules:
        return None
    share = sum(idle.values()) / sum(sizes.values())
    names = some_sites(modules, 3)
    few = f"{share:.0%}" if share >= 0.005 else "less than 1%"
    site = SiteId(f"{modules[0]}/unused")
    return Gap(site, GapKind.NOT_RUN, f"{names} ({few} of the weights)", "no input takes it", len(modules))


def _parameters(context: CheckContext) -> tuple[set[str], dict[str, int]]:
    """Return the layers of which some batch used a parameter, and the elements of each layer's."""
    used: set[str] = set()
    sizes: dict[str, int] = {}
    for number, traced in enumerate(context.flow.every):
        nodes = {node.name: node for node in traced.graph.nodes}
        tied = {id(tensor) for name, tensor in traced.tensors.items() if nodes[name].users}
        counted: set[int] = set()
        for place in traced.placeholders:
            if place.slot is Slot.PARAMETER:
                layer, tensor = place.name.rpartition(".")[0], traced.tensors[place.node]
                if id(tensor) in tied:
                    used.add(layer)
                new = number == 0 and id(tensor) not in counted
                sizes[layer] = sizes.get(layer, 0) + (tensor.numel() if new else 0)
                counted.add(id(tensor))
    return used, sizes


def _whole_modules(idle: Iterable[str], used: set[str]) -> list[str]:
    """Return the largest modules of which no layer is used, in the order of their layers."""
    running = {"", *used, *(layer[:end] for layer in used for end in range(len(layer)) if layer[end] == ".")}
    found: dict[str, None] = {}
    for layer in idle:
        parts = layer.split(".")
        wholes = (".".join(parts[:count]) for count in range(1, len(parts) + 1))
        found[next((whole for whole in wholes if whole not in running), layer) or "(top module)"] = None
    return list(found)


def find(context: CheckContext) -> Iterator[Finding]:
    """Yield one note about all modules that did not run."""
    gap = modules_not_run(context)
    if gap is not None:
        cause = f"no input runs {plural(gap.sites, 'module')} with parameters: {gap.op}"
        advice = "also scan inputs that take them"
        layer = gap.site.rpartition("/")[0]
        yield finding_about("AMP903", gap.site, layer, cause, advice)


CHECK = Check("AMP903", find)
