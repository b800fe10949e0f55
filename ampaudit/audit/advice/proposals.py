"""Lists all proposals for a finding, the least invasive first.

``B(f(A x)) = (2^k B)(f(2^-k A x))`` for a linear B and an f with f(c x) = c f(x) for c > 0, such as ReLU.
Powers of two change no bit of a significand, so FP32 computes exactly the same. The conditions: A's value
is read, through such f alone, by linear B that take it as input (not as a weight), and is not returned; each
of these weights has one use and one name.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

import torch

from ampaudit.audit.advice.interface import AdviceContext, Proposal
from ampaudit.audit.advice.residual import stream_rescaled
from ampaudit.audit.advice.rewrites import is_returned, rewrites
from ampaudit.audit.advice.rules import exemptions_for, propose_exemptions
from ampaudit.findings.finding import Finding
from ampaudit.trace import Site
from ampaudit.trace.flow import Flow
from ampaudit.trace.isolation import structural_copy

_PRODUCTS = ("linear", "conv1d", "conv2d", "conv3d")
_HOMOGENEOUS = frozenset(
    "relu leaky_relu max_pool2d max_pool1d avg_pool2d adaptive_avg_pool2d dropout".split()
)
SPARE_BITS = 2


def proposals(subject: AdviceContext, finding: Finding) -> Iterator[tuple[Proposal, ...]]:
    """Propose a rewrite of the line, then rescaled weights, then float32 for a few ops, then another format.

    Each item holds alternatives, of which the most accurate counts.
    """
    if alternatives := rewrites(subject, finding):
        yield alternatives
    for proposal in (*rescaled(subject, finding), *stream_rescaled(subject, finding)):
        yield (proposal,)
    for exemption in exemptions_for(subject, finding):
        yield (propose_exemptions(subject, (exemption,)),)
    if subject.context.number_format.name == "float16":
        change = "use bfloat16, which has the range of float32"
        yield (Proposal("dtype", change, "--dtype bfloat16", dtype="bfloat16"),)


def rescaled(subject: AdviceContext, finding: Finding) -> Iterator[Proposal]:
    """Propose the change if the overflowing layer and all its readers are products with their own weights."""
    context = subject.context
    site = context.site.get(finding.site)
    if site is None or context.flow.base(site) not in _PRODUCTS:
        return
    readers = _products_after(subject, site)
    first, *after = (_weights(subject, s) for s in (site, *readers))
    if not first or not after or not all(after):
        return
    used = [name for weights in (first, *after) for name in weights]
    if len(used) != len(set(used)) or not _only_used_here(subject, used):
        return
    peak = context.observed(site.id).bad_ref_peak
    if peak <= 0.0:
        return
    bits = math.ceil(math.log2(peak / context.number_format.max)) + SPARE_BITS
    following = [weights[0] for weights in after]
    change = (
        f"multiply {', '.join(first)} by 2^-{bits}, and {', '.join(following)} by 2^{bits}: the same function"
    )
    scales = [(name, -bits) for name in first] + [(name, bits) for name in following]
    lines = [f'model.get_parameter("{name}").mul_(2.0**{power})' for name, power in scales]
    paste = "with torch.no_grad(): " + "; ".join(lines)
    changed = structural_copy(subject.model)
    parameters = dict(changed.named_parameters())
    with torch.no_grad():
        for name, power in scales:
            parameters[name].mul_(2.0**power)
    yield Proposal("rescale", change, paste, model=changed)


def _products_after(subject: AdviceContext, site: Site) -> list[Site]:
    """Return the products that read a value through homogeneous ops; empty if any other op reads it."""
    flow, products, frontier = subject.context.flow, list[Site](), [site]
    while frontier:
        step = frontier.pop()
        readers = flow.readers(step)
        if not readers or is_returned(flow, flow.node(step)):
            return []
        for reader in readers:
            if flow.base(reader) in _PRODUCTS and _takes(flow, reader, step):
                products.append(reader)
            elif flow.base(reader) in _HOMOGENEOUS:
                frontier.append(reader)
            else:
                return []
    return list({reader.id: reader for reader in products}.values())


def _takes(flow: Flow, product: Site, step: Site) -> bool:
    """Return whether a product reads a value as its input, and not as its weight or bias."""
    first, *rest = (flow.producer(node) for node in flow.node(product).all_input_nodes)
    return first is not None and first.id == step.id and all(m is None or m.id != step.id for m in rest)


def _weights(subject: AdviceContext, site: Site) -> list[str]:
    """Return the names of weight and bias; none if one of them is no parameter."""
    flow, names = subject.context.flow, dict(subject.model.named_parameters(remove_duplicate=False)).keys()
    arguments = flow.arguments(site)
    tensors = [arguments[key] for key in ("weight", "bias") if arguments.get(key) is not None]
    places = [place for place in map(flow.placeholder, tensors) if place is not None and place.name in names]
    return [place.name for place in places] if len(places) == len(tensors) else []


def _only_used_here(subject: AdviceContext, names: list[str]) -> bool:
    """Return whether each weight has one use and one name, and shares memory with no other tensor."""
    parameters, traced = (
        dict(subject.model.named_parameters(remove_duplicate=False)),
        subject.context.flow.traced,
    )
    tensors = [*parameters.values(), *subject.model.buffers()]
    counts = Counter(tensor.untyped_storage()._cdata for tensor in tensors)
    nodes = {node.name: node for node in traced.graph.nodes}
    users = {place.name: nodes[place.node].users for place in traced.placeholders}
    return all(counts[parameters[n].untyped_storage()._cdata] == len(users[n]) == 1 for n in names)
