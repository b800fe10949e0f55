"""The rule format: what each condition and action does, on models; rules about neighbours, and coverage."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import torch
from torch import nn

from ampaudit.core.formats import BFLOAT16, FLOAT16, NumberFormat
from ampaudit.policy import OpFacts, RuleSet, TargetEnvironment, load_policy
from ampaudit.policy.decide import PlanSite, plan_graph
from ampaudit.policy.schema import UNSET, ArgTest, Cast, NumericCondition
from ampaudit.trace import Role, TraceConfig, TracedModel, trace
from ampaudit.trace.caster import MIXED_DTYPES
from tests.support.zoo import ZOO

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
    return trace(model, (torch.randn(4, 8),), {}, TraceConfig(rules, load_policy("torch-cuda"), form))


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
        here = rules.for_environment(TargetEnvironment(capability, {"torch": version}))
        assert (here.decide(facts).rule == "hopper") is applies


def test_scan_and_plan_know_the_version_and_no_device_here(tmp_path: Path) -> None:
    from ampaudit import scan
    from ampaudit.audit.plan import plan
    from ampaudit.source import Batch, ModelSource

    text = """
  - id: version
    match: {op: [linear]}
    when: {versions: {torch: ">=2"}}
    cast: lower

  - id: device
    match: {op: [softmax.int]}
    when: {capability: {min: 1.0}}
    cast: lower
"""
    x = torch.randn(4, 8)
    rules = policy(tmp_path, text)
    found = {s.rule for s in scan(Model().eval(), x, policy=rules, device="cpu").sites}
    source = ModelSource("Model", "object", Model().eval(), (Batch((x,)),))
    planned = {s.rule for s in plan(source, policy=rules, device="cpu").sites}
    assert found == planned | {None}
    assert "version" in planned
    assert "device" not in planned


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


def test_clamp_of_a_float32_op(tmp_path: Path) -> None:
    from ampaudit import scan

    layer = nn.Linear(4, 4, bias=False)
    nn.init.constant_(layer.weight, 100.0)
    rule = "  - id: it\n    match: {op: [linear]}\n    cast: float32\n    clamp: 200\n"
    report = scan(nn.Sequential(layer).eval(), torch.ones(1, 4), policy=policy(tmp_path, rule))
    assert report.outputs[0].sqnr_db == pytest.approx(6.02, abs=0.01)  # 200 instead of 400


def test_depth_says_nothing_about_ops_without_one(tmp_path: Path) -> None:
    rules = policy(tmp_path, "  - id: it\n    when: {depth: {max: 1000000}}\n    cast: float32\n")
    assert {name.split("/")[1] for name in decided(traced(rules), "it")} == {"linear", "softmax"}


def test_true_is_not_one() -> None:
    assert ArgTest(equals=1).holds(1)
    assert not ArgTest(equals=1).holds(True)
    assert ArgTest.model_validate({"in": [True]}).holds(True)
    assert not ArgTest.model_validate({"in": [True]}).holds(1)
    assert ArgTest(equals=None).holds(None)
    assert not ArgTest(equals=None).holds(UNSET)
    assert ArgTest(magnitude=NumericCondition(max=2)).holds([-2, 1])
    assert not ArgTest(range=NumericCondition(min=0)).holds([-2, 1])


class Odd(nn.Conv2d):
    """A layer with a property that cannot be read."""

    @property
    def broken(self) -> int:
        raise ValueError("not now")


@pytest.mark.parametrize(
    ("attributes", "applies"),
    [
        ("{groups: 1}", True),
        ("{groups: true}", False),  # as for arguments, True is not 1
        ("{bias: null, padding_mode: zeros}", True),
        ("{kernel_size: 3}", False),
        ("{weight: 1.0}", False),
        ("{broken: 1}", False),
        ("{broken: null}", False),
    ],
)
def test_attributes_are_compared_as_values(attributes: str, applies: bool, tmp_path: Path) -> None:
    match = f"match: {{attributes: {attributes}}}"
    rules = policy(tmp_path, f"  - id: it\n    {match}\n    cast: float32\n")
    facts = OpFacts("conv2d", "", "float16", module=Odd(3, 4, 3, bias=False))
    assert (rules.decide(facts).rule == "it") is applies


def test_composite_ops_stay_whole_only_for_rules_that_name_them() -> None:
    class Similar(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cosine_similarity(x, x + 1)

    names = {p: {s.id for s in traced(load_policy(p), Similar()).sites} for p in ("half", "torch-cuda")}
    assert "(top)/cosine_similarity" in names["torch-cuda"]
    assert "(top)/cosine_similarity" not in names["half"]
    assert len(names["half"]) > 4


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


def test_a_policy_under_which_the_model_does_not_run_says_which_op() -> None:
    """Apex has no rule for fused attention: rotary embeddings leave q and k in float32 and v in float16."""
    zoo = ZOO["llama"]()
    found = trace(
        zoo.model.eval(),
        (),
        zoo.kwargs,
        TraceConfig(load_policy("apex-o1"), load_policy("torch-cuda"), FLOAT16),
    )
    refused = [site for site in found.sites if site.decision.reason == MIXED_DTYPES]
    assert refused
    assert {site.op for site in refused} == {"aten.scaled_dot_product_attention.default"}
    assert all("same dtype" in site.decision.why for site in refused)


def test_an_argument_that_is_written_is_never_cast(tmp_path: Path) -> None:
    class InPlace(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            h = x * 1.0
            h += x
            return h

    rule = '  - id: it\n    match: {op: ["@add"]}\n    cast: lower\n    arguments: {self: lower}\n'
    found = traced(policy(tmp_path, rule), InPlace())
    assert not [s for s in found.sites if s.role is Role.INSERTED_CAST]
    add = next(node for node in found.graph.nodes if str(node.target) == "aten.add_.Tensor")
    assert add.meta["val"].dtype is torch.float32
    assert "mul" in str(add.args[0])


def test_extends_overrides_drops_and_inherits(tmp_path: Path) -> None:
    policy(
        tmp_path,
        "  - id: a\n    match: {op: [linear]}\n    cast: lower\n\n"
        "  - id: b\n    match: {op: [conv2d, conv3d]}\n    cast: lower\n\n"
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
    ops = ("linear", "conv2d", "conv3d", "conv1d")
    found = [child.decide(OpFacts(op, "", "float16")).cast for op in ops]
    assert found == [Cast.LOWER, Cast.FLOAT32, Cast.FOLLOW, Cast.FOLLOW]
    assert child.file.autocast
    assert child.file.weights.outputs == "float32"
    assert child.file.loss_scale == "apex"
    assert child.name == "child"
    assert [rule.id for rule in child.file.rules] == ["b", "a"]


def test_formats_may_differ(tmp_path: Path) -> None:
    rules = load_policy("ampaudit")
    assert rules.decide(OpFacts("var.correction", "", "float16")).rule == "ampaudit/variance"
    assert rules.decide(OpFacts("mean.dim", "", "bfloat16")).rule == "ampaudit/variance-bf16"
    assert rules.decide(OpFacts("mean.dim", "", "float16", depth=100)).rule is None
    assert rules.decide(OpFacts("mean.dim", "", "float16", depth=512 * 512)).rule == "ampaudit/long-mean"
    assert dtype_of(traced(load_policy("half"), form=BFLOAT16), "blocks.0.up/linear") is torch.bfloat16


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


@pytest.mark.parametrize("name", ["ampaudit", "torch-cuda", "mxnet-fp16", "tensorflow", "paddle-o1"])
def test_every_op_of_the_zoo_is_in_a_class_or_explicitly_default(name: str) -> None:
    rules = load_policy(name)
    seen: dict[str, str | None] = {}
    for make in itertools.islice(ZOO.values(), 13):
        zoo = make()
        found = trace(
            zoo.model.eval(), (), zoo.kwargs, TraceConfig(rules, load_policy("torch-cuda"), FLOAT16)
        )
        for site in found.sites:
            if site.facts is not None:
                seen[site.facts.op] = site.decision.rule
                assert site.decision.why
                assert site.decision.explicit or site.decision.reason in ("default", "author")
    assert len(seen) > 60
    assert sum(rule is not None for rule in seen.values()) > 10
