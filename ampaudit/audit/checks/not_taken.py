"""AMP903: parts of the model that no input has run."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator

from ampaudit.audit.checks.interface import Check, CheckContext, finding_about
from ampaudit.core.sites import SiteId
from ampaudit.core.text import listed
from ampaudit.report.finding import Finding
from ampaudit.report.gap import Gap, GapKind

__all__ = ["CHECK", "modules_not_run"]


def modules_not_run(context: CheckContext) -> Gap | None:
    """Return the modules and experts whose parameters no batch used, with their share of all parameters."""
    used, sizes, parts = context.parameters
    idle = {name: size for name, size in sizes.items() if name not in used}
    modules = _whole_modules(idle, used)
    experts = [
        f"{part.unused} of {part.of} experts of {layer or '(top module)'}" for layer, part in parts.items()
    ]
    if not modules and not experts:
        return None
    unused = sum(idle.values()) + sum(part.elements for part in parts.values())
    share = unused / sum(sizes.values())
    names = listed([*modules, *experts], 3)
    few = f"{share:.0%}" if share >= 0.005 else "less than 1%"
    site = SiteId(f"{[*modules, *parts][0]}/unused")
    count = len(modules) + len(experts)
    return Gap(site, GapKind.NOT_RUN, f"{names} ({few} of the weights)", "no input takes it", count)


def _whole_modules(idle: Iterable[str], used: Collection[str]) -> list[str]:
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
        cause = f"no input runs {gap.op}"
        advice = "also scan inputs that take them"
        layer = gap.site.rpartition("/")[0]
        yield finding_about("AMP903", gap.site, layer, cause, advice)


CHECK = Check("AMP903", find)
