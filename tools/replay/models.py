"""Audits from Python of the tests' models, failing and healthy."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampaudit.audit.scan import scan
from ampaudit.render.json import to_json
from ampaudit.tuning.tune import tune
from tests.paths.cases import AUDITED, PLANTED, batches_of, load
from tests.paths.flips import DECISIONS
from tests.support import models, own_backwards, silent
from tests.support import tuning as graphs
from tests.support.planted import MaskedAttention, ResidualStream, TwoBranches
from tests.support.soundness.fuzz import SETTINGS, random_branches
from tests.support.soundness.program import BranchModel
from tests.support.training import cases as training
from tests.support.zoo import ZOO
from tools.replay.case import Run, audit, family

SLOW = {"encodec", "generate_beam", "longformer", "mimi", "qwen_vision"}  # three to six seconds each


@family
def failures() -> Iterator[tuple[str, Run]]:
    """Reported failures under the policies that break them, and their healthy twins."""
    for case in models.CASES.values():
        for combination, (policy, dtype) in models.COMBINATIONS.items():
            if combination in (*case.breaks, *case.wrong):
                build = partial(_evaluated, case.build, True)
                yield f"{case.name}-{combination}", audit(build, policy=policy, dtype=dtype)
        policy, dtype = models.COMBINATIONS[case.breaks[0]]
        yield (
            f"{case.name}-healthy",
            audit(partial(_evaluated, case.build, False), policy=policy, dtype=dtype),
        )


@family
def silent_failures() -> Iterator[tuple[str, Run]]:
    for case in silent.CASES.values():
        if case.name == "running_mean_by_hand":  # ten seconds
            continue
        for name, bad in (("wrong", True), ("repaired", False)):
            build = partial(_evaluated, case.build, bad)
            yield f"{case.name}-{name}", audit(build, policy=case.policy, dtype=case.dtype)


@family
def planted_faults() -> Iterator[tuple[str, Run]]:
    faults = {
        "branches": (TwoBranches, ()),
        "left": (TwoBranches, (1e6,)),
        "stream": (ResidualStream, ()),
        "attention": (MaskedAttention, ()),
        "masked": (MaskedAttention, (True,)),
    }
    for name, (kind, arguments) in faults.items():
        build = partial(_built, kind, *arguments)
        yield name, audit(build, policy="torch-cuda")
        yield f"{name}-advised", audit(build, policy=["half", "torch-cuda"], advise=True, prove=True)


@family
def zoo() -> Iterator[tuple[str, Run]]:
    for name in ZOO:
        yield f"{name}-half", audit(partial(_of_the_zoo, name), policy="half", prove=True)
    for name in ("bert", "llama", "resnet"):
        yield f"{name}-bfloat16", audit(partial(_of_the_zoo, name), dtype="bfloat16")


@family
def paths() -> Iterator[tuple[str, Run]]:
    """Models that are audited along the path that their inputs take."""
    for name, policy in dict(AUDITED).items():  # the second policy of each
        if name not in SLOW:
            yield f"{name}-{policy}", _along_paths(name, "get_model", policy)
    for name in [name for name in PLANTED if name not in SLOW]:
        yield f"{name}-planted", _along_paths(name, "planted", "half")


@family
def decisions() -> Iterator[tuple[str, Run]]:
    for name, decision in DECISIONS.items():
        for outcome in ("flips", "holds"):
            inputs = decision.inputs(getattr(decision, outcome))
            yield f"{name}-{outcome}", audit(lambda d=decision, x=inputs: (d.model(), x), policy="half")


@family
def gradients() -> Iterator[tuple[str, Run]]:
    for make in (*training.PLANTED, *training.HEALTHY):
        yield make.__name__, _with_gradients(make)
    for name, kind in vars(own_backwards).items():
        if (
            isinstance(kind, type)
            and issubclass(kind, torch.autograd.Function)
            and kind.__module__ == own_backwards.__name__
        ):
            yield (
                f"function-{name}",
                audit(partial(_with_function, kind), policy="half", backward=True, loss=training.classes),
            )


@family
def bounds() -> Iterator[tuple[str, Run]]:
    """Proofs about random programs."""
    for setting in SETTINGS:
        for seed in range(2):
            build = partial(_random_program, seed, setting)
            yield f"{setting}-{seed}", audit(build, policy=setting.policy, dtype=setting.dtype, static=True)


@family
def tuned() -> Iterator[tuple[str, Run]]:
    for graph in list(graphs.GRAPHS.values())[::2]:
        yield graph.name, partial(_tuned, graph)


def _evaluated(build: Any, bad: bool) -> tuple[nn.Module, Any]:
    model, inputs = build(bad)
    return model.eval(), inputs


def _built(kind: type[nn.Module], *arguments: Any) -> tuple[nn.Module, Any]:
    return kind(*arguments).eval(), torch.randn(4, 16)


def _of_the_zoo(name: str) -> tuple[nn.Module, Any]:
    entry = ZOO[name]()
    return entry.model.eval(), entry.kwargs


def _along_paths(name: str, factory: str, policy: str) -> Run:
    def run(_: Path) -> str:
        module = load(name)
        model = getattr(module, factory)()
        return to_json(scan(model, batches=batches_of(module), policy=policy))

    return run


def _with_gradients(make: Any) -> Run:
    def run(_: Path) -> str:
        case = make()
        return to_json(scan(case.model, case.inputs, policy="half", backward=True, loss=case.loss))

    return run


def _with_function(kind: Any) -> tuple[nn.Module, Any]:
    return own_backwards.Net(kind.apply), torch.randn(8, own_backwards.WIDTH)


def _random_program(seed: int, setting: Any) -> tuple[nn.Module, Any]:
    model = BranchModel(random_branches(seed, setting, 8))
    return model, tuple(item.tensor(torch.rand(item.shape)) for item in model.inputs)


def _tuned(graph: Any, _: Path) -> str:
    model, inputs = graph.made()
    return to_json(tune(model, inputs, min_sqnr=60.0))
