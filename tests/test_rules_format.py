"""The rule format: what each condition and action does, on models; painting and depth against oracles."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from ampaudit.errors import TraceFailed
from ampaudit.formats import BFLOAT16, FLOAT16, NumberFormat
from ampaudit.policy import Environment, OpFacts, RuleSet, load_policy
from ampaudit.policy.painting import paint
from ampaudit.policy.planning import PlanSite, plan_graph
from ampaudit.policy.schema import Cast
from ampaudit.trace import Role, TracedModel, trace
from ampaudit.trace.depth import reduction_depth
from ampaudit.trace.facts import named_arguments

from .zoo import ZOO

HEAD = "name: mine\ntitle: a test\n"
TAIL = "    reason: range\n    why: it is so.\n    source: this test\n"


def policy(path: Path, rules: str, head: str = "", name: str = "mine") -> RuleSet:
    """A policy from rules without their last three keys, separated by blank lines."""
    items = "".join(f"{rule.rstrip()}\n{TAIL}" for rule in rules.strip("\n").split("\n\n") if rule.strip())
    file = path / f"{name}.yaml"
    file.write_text(HEAD.replace("mine", name) + head + "rules:\n" + items)
    return load_policy(str(file))


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(8, 32)
        self.norm = nn.BatchNorm1d(32)
        self.plain_norm = nn.BatchNorm1d(32, affine=False)
        self.down = nn.Linear(32, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.plain_norm(self.norm(self.up(x)))
        return torch.softmax(self.down(h) + 1e-9, dim=-1) * 1e9


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


def traced(rules: RuleSet, model: nn.Module | None = None, form: NumberFormat = FLOAT16) -> TracedModel:
    model = (model or Model()).eval()
    return trace(model, (torch.randn(4, 8),), {}, rules, load_policy("torch-cuda"), form)


def decided(found: TracedModel, rule: str) -> list[str]:
    return [s.id for s in found.sites if s.decision.rule == rule and s.role is not Role.INSERTED_CAST]


CONDITIONS = {
    "match: {op: [linear]}": 4,
    'match: {op: ["@softmax"]}': 2,
    'match: {op: ["softmax.*"]}': 2,
    'match: {layer: ["blocks.1*"]}': 7,
    'match: {op: [linear], layer: ["*.up"]}': 2,
    'match: {layer_regex: ["^blocks\\\\.0\\\\.(up|down)$"]}': 2,
    "match: {module: [BatchNorm1d]}": 4,
    "match: {module: [_BatchNorm]}": 4,
    "match: {module: [torch.nn.modules.batchnorm.BatchNorm1d]}": 4,
    "match: {module: [_BatchNorm], attributes: {affine: true}}": 2,
    "match: {module: [_BatchNorm], attributes: {affine: false, eps: 1.0e-5}}": 2,
    'match: {parameter: ["*.down.weight"]}': 2,
    'match: {parameter: ["*.running_mean"]}': 4,
    'match: {site: ["blocks.1/add"]}': 1,
    "match: {op: [linear]}\n    when: {depth: {min: 32}}": 2,
    "match: {op: [linear]}\n    when: {depth: {below: 32}}": 2,
    "match: {op: [add.Tensor]}\n    when: {arguments: {other: {magnitude: {below: 1.0e-8}}}}": 2,
    "match: {op: [mul.Tensor]}\n    when: {arguments: {other: {range: {min: 1, max: 100}}}}": 0,
    "match: {op: [softmax.int]}\n    when: {arguments: {dim: {equals: -1}}}": 2,
    "match: {op: [softmax.int]}\n    when: {arguments: {dim: {in: [0, 1]}}}": 0,
    "match: {op: [softmax.int]}\n    when: {arguments: {dtype: {unset: true}}}": 2,
    "match: {op: [softmax.int]}\n    when: {arguments: {dtype: {unset: false}}}": 0,
    "match: {op: [linear]}\n    when: {dtype: [bfloat16]}": 0,
    "match: {op: [linear]}\n    when: {capability: {min: 8.0}}": 0,  # no device is known
    'match: {op: [linear]}\n    when: {versions: {torch: ">=1"}}': 0,  # nor a version
}


@pytest.mark.parametrize("condition", CONDITIONS, ids=lambda text: " ".join(text.split()))
def test_each_condition_finds_its_sites(tmp_path: Path, condition: str) -> None:
    rules = policy(tmp_path, f"  - id: it\n    {condition}\n    cast: float32\n")
    assert len(decided(traced(rules), "it")) == CONDITIONS[condition]


def test_device_and_version_conditions(tmp_path: Path) -> None:
    rules = policy(
        tmp_path,
        """
  - id: hopper
    match: {op: [linear]}
    when: {capability: {min: 9.0}, versions: {torch: ">=2.1,<3"}}
    cast: lower
""",
    )
    facts = OpFacts("linear", "", "float16")
    for capability, version, applies in ((9.0, "2.13.0", True), (8.0, "2.13.0", False), (9.0, "3.0", False)):
        here = rules.within(Environment(capability, {"torch": version}))
        assert (here.decide(facts).rule == "hopper") is applies


def dtype_of(found: TracedModel, site: str) -> torch.dtype | None:
    return next(s.dtype for s in found.sites if s.id == site)


def test_per_argument_actions_and_forms_of_output(tmp_path: Path) -> None:
    rules = policy(
        tmp_path,
        """
  - id: norm
    match: {op: [batch_norm]}
    cast: lower
    arguments: {weight: keep, bias: keep, running_mean: keep, running_var: keep}
""",
        "weights: {outputs: float32}\n",
    )
    found = traced(rules)
    casts = {s.weight for s in found.sites if s.role is Role.WEIGHT_CAST}
    assert casts == set()
    assert dtype_of(found, "blocks.0.norm/batch_norm") is torch.float16
    output = found.graph.output_node().args[0][0]  # type: ignore[index]
    assert output.meta["val"].dtype is torch.float32  # type: ignore[union-attr]


def test_clamp_keeps_the_output_in_range_and_the_reference_exact(tmp_path: Path) -> None:
    from ampaudit import scan

    class Grows(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(4, 4, bias=False)
            nn.init.constant_(self.first.weight, 1e4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) * 0.5

    rule = "  - id: it\n    match: {op: [linear]}\n    cast: lower\n"
    plain = scan(Grows().eval(), torch.ones(1, 4) * 2, policy=policy(tmp_path, rule))
    clamped = scan(Grows().eval(), torch.ones(1, 4) * 2, policy=policy(tmp_path, rule + "    clamp: max\n"))
    assert [f.site for f in plain.findings if f.code == "AMP101"] == ["first/linear"]
    half = next(s for s in clamped.sites if s.site == "(top)/mul")
    assert half.forward is not None
    assert half.forward.inf == 0
    assert half.forward.peak == pytest.approx(40000.0)  # the reference was not clamped
    assert half.forward.sqnr_db is not None
    assert half.forward.sqnr_db < 20


def test_narrowest_and_widest(tmp_path: Path) -> None:
    class Adds(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.first(x) + x

    for cast, expected in (("narrowest", torch.float16), ("widest", torch.float32)):
        rules = policy(
            tmp_path,
            f"  - id: a\n    match: {{op: [linear]}}\n    cast: lower\n\n  - id: b\n"
            f'    match: {{op: ["@add"]}}\n    cast: {cast}\n',
        )
        assert dtype_of(traced(rules, Adds()), "(top)/add") is expected


def test_a_policy_under_which_the_model_does_not_run_says_which_op_and_what_to_add() -> None:
    """Apex has no rule for fused attention: rotary embeddings leave q and k in float32 and v in float16."""
    zoo = ZOO["llama"]()
    with pytest.raises(TraceFailed, match="same dtype") as caught:
        trace(zoo.model.eval(), (), zoo.kwargs, load_policy("apex-o1"), load_policy("torch-cuda"), FLOAT16)
    assert "apex-o1" in caught.value.hint
    assert "widest" in caught.value.hint


def test_an_argument_that_is_written_is_never_cast(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x * 1.0
            h += x
            return h

    rules = policy(tmp_path, '  - id: it\n    match: {op: ["@add"]}\n    cast: lower\n')
    found = traced(rules, InPlace())
    add = next(node for node in found.graph.nodes if str(node.target) == "aten.add_.Tensor")
    assert add.meta["val"].dtype is torch.float32
    assert "mul" in str(add.args[0])


def test_extends_overrides_drops_and_inherits(tmp_path: Path) -> None:
    policy(
        tmp_path,
        "  - id: a\n    match: {op: [linear]}\n    cast: lower\n\n"
        "  - id: b\n    match: {op: [conv2d]}\n    cast: lower\n\n"
        "  - id: c\n    match: {op: [conv1d]}\n    cast: lower\n",
        "autocast: true\nweights: {outputs: float32}\nloss_scale: apex\n",
        name="parent",
    )
    child = policy(
        tmp_path,
        "  - id: b\n    match: {op: [conv2d]}\n    cast: float32\n",
        "extends: [parent.yaml]\ndrop: [c]\n",
        name="child",
    )
    found = {op: child.decide(OpFacts(op, "", "float16")).cast for op in ("linear", "conv2d", "conv1d")}
    assert found == {"linear": Cast.LOWER, "conv2d": Cast.FLOAT32, "conv1d": Cast.FOLLOW}
    assert child.file.autocast
    assert child.file.weights.outputs == "float32"
    assert child.file.loss_scale == "apex"
    assert child.name == "child"


def test_formats_may_differ(tmp_path: Path) -> None:
    rules = load_policy("ampaudit")
    assert rules.decide(OpFacts("var.correction", "", "float16")).rule == "ampaudit/variance"
    assert rules.decide(OpFacts("mean.dim", "", "bfloat16")).rule == "ampaudit/variance-bf16"
    assert rules.decide(OpFacts("mean.dim", "", "float16", depth=100)).rule is None
    assert rules.decide(OpFacts("mean.dim", "", "float16", depth=512 * 512)).rule == "ampaudit/long-mean"
    assert dtype_of(traced(load_policy("half"), form=BFLOAT16), "blocks.0.up/linear") is torch.bfloat16


# -- painting ------------------------------------------------------------------------------------------

COLOURS = (Cast.ALLOW, Cast.DENY, Cast.INFER, Cast.CLEAR, Cast.FLOAT32)


@st.composite
def graphs(draw: st.DrawFn) -> tuple[list[Cast], list[list[int]]]:
    size = draw(st.integers(1, 9))
    colours = draw(st.lists(st.sampled_from(COLOURS), min_size=size, max_size=size))
    inputs = [
        draw(st.lists(st.integers(0, n - 1), unique=True, max_size=3)) if n else [] for n in range(size)
    ]
    return colours, inputs


def painted_by_definition(colours: list[Cast], inputs: list[list[int]]) -> list[bool]:
    """The four steps, by enumerating every directed path of the graph (exponential, and obvious)."""
    size = len(colours)
    free = {n for n in range(size) if colours[n] in (Cast.INFER, Cast.CLEAR)}
    paths: list[list[int]] = [[n] for n in range(size)]
    for path in paths:
        paths.extend([*path, user] for user in range(size) if path[-1] in inputs[user])
    denied = {n for n in range(size) if colours[n] is Cast.DENY}
    ends = (Cast.DENY, Cast.INFER)
    for path in paths:
        inside = path[1:-1]
        if colours[path[0]] is Cast.DENY and colours[path[-1]] in ends and set(inside) <= free:
            denied |= {n for n in path[1:] if n in free}
    low = {n for n in range(size) if colours[n] is Cast.ALLOW}
    open_way = free - denied
    between = {
        n
        for path in paths
        if len(path) > 2 and path[0] in low and path[-1] in low and set(path[1:-1]) <= open_way
        for n in path[1:-1]
    }
    low |= between
    clear = {n for n in range(size) if colours[n] is Cast.CLEAR} - denied
    while True:
        more = {
            n
            for n in clear - low
            if any(m in low for m in [*inputs[n], *(u for u in range(size) if n in inputs[u])])
        }
        if not more:
            return [n in low for n in range(size)]
        low |= more


@settings(max_examples=400, deadline=None)
@given(graphs())
def test_painting_equals_its_definition(graph: tuple[list[Cast], list[list[int]]]) -> None:
    colours, inputs = graph
    assert paint(colours, inputs) == painted_by_definition(colours, inputs)


def test_neighbour_rules_spread_until_nothing_changes(tmp_path: Path) -> None:
    rules = policy(
        tmp_path,
        """
  - id: start
    match: {op: [exp]}
    cast: float32

  - id: with-producer
    match: {op: ["@add"]}
    when: {producer: float32}
    cast: float32

  - id: with-consumer
    match: {op: ["@mul"]}
    when: {consumer: float32}
    cast: float32
""",
        "level: graph\ndefaults: {cast: lower, why: the rest is low.}\n",
    )
    ops = ["mul.Tensor", "exp", "add.Tensor", "add.Tensor", "relu", "mul.Tensor"]
    inputs = [(), (0,), (1,), (2,), (3,), (4,)]
    sites = [PlanSite(OpFacts(op, "", "float16"), i) for op, i in zip(ops, inputs, strict=True)]
    casts = [d.cast for d in plan_graph(rules, sites)]
    assert casts == [Cast.FLOAT32] * 4 + [Cast.LOWER] * 2


# -- depth ------------------------------------------------------------------------------------------

ONES = torch.ones
DEPTHS: list[tuple[Any, tuple[Any, ...], dict[str, Any]]] = [
    (torch.ops.aten.linear.default, (ONES(2, 7), ONES(3, 7)), {}),
    (torch.ops.aten.mm.default, (ONES(2, 7), ONES(7, 3)), {}),
    (torch.ops.aten.bmm.default, (ONES(4, 2, 7), ONES(4, 7, 3)), {}),
    (torch.ops.aten.addbmm.default, (torch.zeros(2, 3), ONES(4, 2, 7), ONES(4, 7, 3)), {}),
    (torch.ops.aten.baddbmm.default, (torch.zeros(4, 2, 3), ONES(4, 2, 7), ONES(4, 7, 3)), {}),
    (torch.ops.aten.addmm.default, (torch.zeros(2, 3), ONES(2, 7), ONES(7, 3)), {}),
    (torch.ops.aten.matmul.default, (ONES(5, 2, 7), ONES(7, 3)), {}),
    (torch.ops.aten.mv.default, (ONES(2, 7), ONES(7)), {}),
    (torch.ops.aten.dot.default, (ONES(7), ONES(7)), {}),
    (torch.ops.aten.einsum.default, ("bij,bjk->ik", [ONES(4, 2, 7), ONES(4, 7, 3)]), {}),
    (torch.ops.aten.conv1d.default, (ONES(1, 6, 9), ONES(4, 3, 5), None, [1], [0], [1], 2), {}),
    (
        torch.ops.aten.conv2d.default,
        (ONES(1, 6, 9, 9), ONES(4, 3, 5, 2), None, [1, 1], [0, 0], [1, 1], 2),
        {},
    ),
    (torch.ops.aten.conv3d.default, (ONES(1, 2, 5, 5, 5), ONES(4, 2, 3, 2, 2)), {}),
    (torch.ops.aten.sum.default, (ONES(3, 4, 5),), {}),
    (torch.ops.aten.sum.dim_IntList, (ONES(3, 4, 5), [0, 2]), {}),
    (torch.ops.aten.sum.dim_IntList, (ONES(3, 4, 5), [-1], True), {}),
    (torch.ops.aten.nansum.default, (ONES(3, 4),), {}),
]


@pytest.mark.parametrize("case", DEPTHS, ids=lambda case: str(case[0]))
def test_depth_is_what_adds_up_in_an_op_on_ones(case: tuple[Any, tuple[Any, ...], dict[str, Any]]) -> None:
    op, args, kwargs = case
    assert reduction_depth(op, named_arguments(op, args, kwargs)) == op(*args, **kwargs).max().item()


def test_depth_of_means_is_the_product_of_the_axes() -> None:
    aten = torch.ops.aten
    image = ONES(2, 3, 512, 512)
    for op, args, expected in (
        (aten.mean.dim, (image, [2, 3]), 512 * 512),
        (aten.var.correction, (image, [0, 2]), 1024),
        (aten.softmax.int, (image, 1), 3),
        (aten.avg_pool2d.default, (image, [4]), 16),
        (aten.adaptive_avg_pool2d.default, (image, [1, 1]), 512 * 512),
        (aten.layer_norm.default, (image, [512, 512]), 512 * 512),
        (aten.group_norm.default, (image, 3), 512 * 512),
        (aten.relu.default, (image,), None),
    ):
        assert reduction_depth(op, named_arguments(op, args, {})) == expected


# -- coverage ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ampaudit", "torch-cuda", "mxnet-fp16", "tensorflow", "paddle-o1"])
def test_every_op_of_the_zoo_is_in_a_class_or_explicitly_default(name: str) -> None:
    rules = load_policy(name)
    seen: dict[str, str | None] = {}
    for make in itertools.islice(ZOO.values(), 13):
        zoo = make()
        found = trace(zoo.model.eval(), (), zoo.kwargs, rules, load_policy("torch-cuda"), FLOAT16)
        for site in found.sites:
            if site.facts is not None:
                seen[site.facts.op] = site.decision.rule
                assert site.decision.why
                assert site.decision.explicit or site.decision.reason in ("default", "author")
    assert len(seen) > 60
    assert sum(rule is not None for rule in seen.values()) > 10
