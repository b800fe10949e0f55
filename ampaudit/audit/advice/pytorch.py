"""Writes float32 exemptions as PyTorch code, for models that run without an ampaudit policy."""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence

from ampaudit.audit.advice.interface import AdviceContext, Exemption, Proposal
from ampaudit.audit.advice.rules import border, exempt_sites, literal
from ampaudit.core.formats import FLOAT16, NumberFormat
from ampaudit.core.sites import SiteId
from ampaudit.policy import RuleSet, load_policy
from ampaudit.policy.schema import Cast, KeepFp32
from ampaudit.trace.isolation import structural_copy

_IN_AUTOCAST = '''\
import torch

device = next(model.parameters()).device.type


def keep_in_float32(layer):
    """Run a layer without autocast, on inputs in float32."""

    def cast(x):
        return x.float() if isinstance(x, torch.Tensor) and x.is_floating_point() else x

    class Float32(type(layer)):
        def forward(self, *args, **kwargs):
            with torch.autocast(device, enabled=False):
                return super().forward(*map(cast, args), **{name: cast(x) for name, x in kwargs.items()})

    layer.__class__ = Float32


for name in KEPT:
    keep_in_float32(model.get_submodule(name))
'''
_STORED = '''\
import torch


def cast_inputs(layer):
    """Run a layer on inputs in the dtype of its weights; float32 if it has none."""

    class CastInputs(type(layer)):
        def forward(self, *args, **kwargs):
            dtype = next((p.dtype for p in self.parameters()), torch.float32)

            def cast(x):
                return x.to(dtype) if isinstance(x, torch.Tensor) and x.is_floating_point() else x

            return super().forward(*map(cast, args), **{name: cast(x) for name, x in kwargs.items()})

    layer.__class__ = CastInputs


for name in CAST:
    cast_inputs(model.get_submodule(name))
'''
# tried by a rule about the stored weights instead: the reference needs the FP32 model
_STORE = '''\


def tensors():
    """List the weights and buffers that stay in float32, as they are now."""
    layers = [model.get_submodule(name) for name in KEPT]
    parameters = [p for layer in layers for _, p in layer.named_parameters(remove_duplicate=False)]
    return parameters + [b for layer in layers for _, b in layer.named_buffers(remove_duplicate=False)]


stored = [tensor.detach().clone() for tensor in tensors()]
model.HALF()
for tensor, value in zip(tensors(), stored):
    tensor.data = value
'''
_WIDTH = 88


def with_code(subject: AdviceContext, members: Sequence[Exemption]) -> tuple[str, Proposal] | None:
    """Return the code, and a proposal to try it: the changed model under PyTorch's own rules.

    Returns ``None`` if PyTorch has no equivalent of the policy, or the layer to exempt is the whole model.
    """
    rules = _eager(subject)
    if rules is None:
        return None
    usual = {rule.id for rule in rules.file.rules}
    sites = subject.context.graph_sites
    promoted = (s.id for s in sites if s.decision.cast is Cast.FLOAT32 and s.decision.rule not in usual)
    every = {*exempt_sites(subject, members), *(site for site in promoted if rules is not subject.rules)}
    layers = _layers(subject, every)
    layers = [n for n in layers if not any(n != other and _lies_in(n, other) for other in layers)]
    if not layers or "" in layers:
        return None
    if rules.file.weights.storage == "lower":
        wide = frozenset(s.id for s in sites if any(_lies_in(s.layer, layer) for layer in layers))
        back = _layers(subject, border(subject, wide))
        cast = [*layers, *(n for n in back if not any(_lies_in(layer, n) for layer in layers))]
        more = (KeepFp32(parameter=(f"{literal(layer)}.*",)) for layer in layers)
        weights = rules.file.weights
        weights = weights.model_copy(update={"keep": (*weights.keep, *more)})
        rules = RuleSet(rules.file.model_copy(update={"weights": weights}), rules.ops, rules.environment)
        tried = _STORED.replace("CAST", _listed(cast))
        method = half_method(subject.context.number_format)
        after = _STORE.replace("HALF", method).replace("KEPT", _listed(layers))
    else:
        tried, after = _IN_AUTOCAST.replace("KEPT", _listed(layers)), ""
    model = structural_copy(subject.model)
    try:  # what is printed is what is tried; names of layers are quoted in it
        exec(tried, {"model": model})
    except Exception:  # no such submodule, or a class that cannot be derived from
        return None
    return tried + after, Proposal("rule", "", "", rules=rules, model=model)


def half_method(form: NumberFormat) -> str:
    """Return the method of a module that casts it to a 16-bit format."""
    return "half" if form is FLOAT16 else "bfloat16"


def code_of_dtype(subject: AdviceContext, dtype: str) -> tuple[str, Proposal] | None:
    """Return the code that runs a model in another 16-bit format, and a proposal to try it.

    Returns ``None`` if PyTorch has no equivalent of the policy.
    """
    eager = _eager(subject)
    if eager is None:
        return None
    if eager.file.weights.storage == "lower":
        code = f"model.{dtype}()"
    else:
        device = "next(model.parameters()).device.type"
        code = f"with torch.autocast({device}, dtype=torch.{dtype}):\n    output = model(*args, **kwargs)"
    return code, Proposal("dtype", "", "", rules=eager, dtype=dtype)


def _eager(subject: AdviceContext) -> RuleSet | None:
    """Return the built-in policy for PyTorch's own behavior that a policy extends, if any."""
    rules = subject.rules
    if rules.file.level != "calls":
        return None
    name: str | None = "half"
    if rules.file.weights.storage != "lower":
        origins = {rule.id.partition("/")[0] for rule in rules.file.rules}
        name = next((name for name in ("torch-cpu", "torch-cuda") if name in origins), None)
        # without parameters, the device for the code is unknown
        if not rules.file.autocast or next(subject.model.parameters(), None) is None:
            return None
    if name is None or name == rules.location:
        return None if name is None else rules
    return load_policy(name).for_environment(rules.environment)


def _layers(subject: AdviceContext, sites: Collection[SiteId]) -> list[str]:
    """Return the layers of sites, in graph order."""
    return list(dict.fromkeys(site.layer for site in subject.context.graph_sites if site.id in sites))


def _lies_in(layer: str, other: str) -> bool:
    """Return whether a layer is another one or inside it."""
    return not other or f"{layer}.".startswith(f"{other}.")


def _listed(names: Sequence[str]) -> str:
    """Write a list of names as Python code, one on a line if they are many."""
    quoted = [json.dumps(name, ensure_ascii=False) for name in names]
    short = f"[{', '.join(quoted)}]"
    return short if len(short) <= _WIDTH else "".join(("[\n", *(f"    {name},\n" for name in quoted), "]"))
