"""The second phase of a policy: what counts as evidence, and policies of level graph on unusual models."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from ampaudit import scan
from ampaudit.policy import Measurement, OpFacts, RuleSet, load_policy
from ampaudit.policy.schema import Cast, RuleFile
from tests.support.planted import AdditiveMask, MaskedAttention
from tests.support.zoo import ZOO


class Wide(nn.Module):
    """A linear whose output passes every threshold, and an op that tames it."""

    def __init__(self, gain: float = 1e4) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)
        nn.init.constant_(self.a.weight, gain)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.a(x))


def test_torch_tensorrt_judges_by_inputs_and_users_only() -> None:
    """As the system does: the linear of 40000 stays in 16 bits, the op that takes it does not."""
    report = scan(Wide().eval(), torch.ones(2, 4), policy="torch-tensorrt")
    assert report.promoted == ("(top)/tanh",)
    producer = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    for layer, value in zip(producer, (0.25, 300.0), strict=True):
        nn.init.constant_(layer.weight, value)
    assert scan(producer.eval(), torch.ones(2, 4), policy="torch-tensorrt").promoted == ("0/linear",)


def test_modelopt_judges_by_inputs_outputs_and_weights() -> None:
    assert scan(Wide().eval(), torch.ones(2, 4), policy="modelopt").promoted == ("a/linear", "(top)/tanh")
    heavy = Wide(70000.0).eval()
    assert scan(heavy, torch.zeros(2, 4), policy="modelopt").promoted == ("a/linear",)
    assert scan(Wide(100.0).eval(), torch.ones(2, 4), policy="modelopt").promoted == ()


@pytest.mark.parametrize("order", [1, -1])
def test_batches_of_different_shapes_count_together(order: int) -> None:
    batches = [torch.ones(2, 4), torch.ones(3, 4) * 1e-6][::order]
    report = scan(Wide().eval(), batches=batches)
    assert report.promoted == ("a/linear", "(top)/tanh")
    assert not report.findings


def test_masks_are_no_evidence() -> None:
    keep = torch.ones(2, 8)
    keep[0, 5:] = 0
    assert scan(AdditiveMask().eval(), (torch.randn(2, 16), keep)).promoted == ()
    assert scan(MaskedAttention().eval(), torch.randn(2, 8, 16)).promoted == ()


class LowMask(nn.Module):
    """Adds a mask in 16 bits that is in range, by less than a factor of 2."""

    def __init__(self) -> None:
        super().__init__()
        self.q = nn.Linear(16, 8)
        self.register_buffer("mask", torch.tensor([0.0] * 5 + [-60000.0] * 3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores = self.q(x)
        return torch.softmax(scores + self.mask.to(scores.dtype), dim=-1)


def test_a_mask_in_16_bits_is_no_evidence_either() -> None:
    report = scan(LowMask().eval(), torch.randn(2, 16))
    assert next(s.precision for s in report.sites if s.site == "(top)/add") == "float16"
    assert report.promoted == ()


def test_measurements_of_two_runs_keep_the_larger_peaks() -> None:
    first = Measurement(weight_peak=1.0, output_peak=5.0)
    second = Measurement(weight_peak=2.0, input_peak=3.0, output_peak=4.0, mask=True)
    assert first.joined(second) == second.joined(first) == Measurement(2.0, 3.0, 5.0, None, True)


@pytest.mark.parametrize("name", ["bert", "t5", "swin", "gemma3"])
def test_healthy_architectures_are_left_alone(name: str) -> None:
    zoo = ZOO[name]()
    report = scan(zoo.model.eval(), zoo.kwargs)
    assert report.promoted == ()
    assert not [f for f in report.findings if f.severity != "note"]


def rule_set(**evidence: object) -> RuleSet:
    rule = {
        "id": "it",
        "cast": "float32",
        "when": {"evidence": evidence},
        "reason": "range",
        "why": "w",
        "source": "s",
    }
    return RuleSet(RuleFile.model_validate({"name": "x", "title": "t", "rules": [rule]}))


@pytest.mark.parametrize(
    ("evidence", "seen", "applies"),
    [
        ({"output_peak": {"above": 10}}, Measurement(output_peak=11), True),
        ({"output_peak": {"above": 10}}, Measurement(output_peak=10), False),
        ({"output_peak": {"above": 10}}, Measurement(input_peak=11), False),
        ({"input_peak": {"min": 10}}, Measurement(input_peak=10), True),
        ({"weight_peak": {"above": 10}}, Measurement(weight_peak=11), True),
        ({"consumer_peak": {"above": 10}}, Measurement(consumer_peak=11, output_peak=1), True),
        ({"headroom_bits": {"below": 1}}, Measurement(output_peak=40000), True),
        ({"headroom_bits": {"below": 1}}, Measurement(output_peak=30000), False),
        ({"headroom_bits": {"below": 1}}, Measurement(output_peak=0), False),
        ({"headroom_bits": {"below": 1}, "mask": False}, Measurement(output_peak=40000, mask=True), False),
        (
            {"output_peak": {"above": 1}, "input_peak": {"above": 1}},
            Measurement(output_peak=2, input_peak=1),
            False,
        ),
    ],
)
def test_evidence(evidence: dict[str, object], seen: Measurement, applies: bool) -> None:
    rules = rule_set(**evidence)
    facts = OpFacts("relu", "", "float16", measurement=seen)
    assert (rules.decide(facts).rule == "it") is applies
    assert rules.promotes(facts) is applies


def test_measured_rules_only_raise_unless_forced() -> None:
    base = {"reason": "range", "why": "w", "source": "s"}
    low = {"id": "low", "match": {"op": ["exp"]}, "cast": "float32", **base}
    measured = {"id": "m", "when": {"evidence": {"output_peak": {"below": 1}}}, "cast": "follow", **base}
    facts = OpFacts("exp", "", "float16", measurement=Measurement(output_peak=0.5))
    for force, rule in ((False, "low"), (True, "m")):
        data = {"name": "x", "title": "t", "rules": [low, measured | {"force": force}]}
        assert RuleSet(RuleFile.model_validate(data)).decide(facts).rule == rule


class Branches(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.a(x)
        return torch.cond(h.sum() > 0, lambda t: self.a(t).exp(), lambda t: t * 2, (h,)) + 1


@pytest.mark.parametrize("policy", ["onnx", "tensorflow", "modelopt", "mxnet-fp16"])
def test_an_op_with_a_graph_of_its_own_stays_in_float32(policy: str) -> None:
    report = scan(Branches().eval(), torch.randn(2, 4), policy=policy)
    precision = {site.site: site.precision for site in report.sites}
    assert precision["a/linear"] == "float16"
    assert precision["(top)/cond"] == "float32"
    assert report.verdict == "pass"


class Authored(nn.Module):
    """Says ``.float()`` and asks for the dtype, as T5 does."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = x * 2
        squares = h.float().pow(2).mean(-1, keepdim=True)
        h = h * torch.rsqrt(squares + 1e-6).to(h.dtype)
        return h.clamp(-60000, 60000) if h.dtype == torch.float16 else h


def test_a_converter_does_not_see_what_the_author_says_about_float16() -> None:
    """Level graph traces the FP32 model: its upcast vanishes and the clamp is not there."""
    x = torch.randn(2, 8)
    graph = {s.site: s.precision for s in scan(Authored().eval(), x, policy="onnx").sites}
    calls = {s.site: s.precision for s in scan(Authored().eval(), x, policy="half").sites}
    assert graph["(top)/pow"] == "float16"
    assert calls["(top)/pow"] == "float32"
    assert "(top)/clamp" in calls
    assert "(top)/clamp" not in graph


def test_an_upcast_that_did_nothing_in_float32_is_not_in_the_graph() -> None:
    words = {"reason": "speed", "why": "w", "source": "s"}
    low = {"id": "low", "match": {"op": ["mul.Tensor"]}, "cast": "lower", **words}
    data = {"name": "x", "title": "t", "level": "graph", "defaults": {"cast": "narrowest"}, "rules": [low]}
    rules = RuleSet(RuleFile.model_validate(data))
    found = {s.site: s.precision for s in scan(Authored().eval(), torch.randn(2, 8), policy=rules).sites}
    assert found["(top)/pow"] == found["(top)/mean"] == "float16"
    assert "(top)/to" not in found


def test_decisions_of_an_inner_op_hold_for_the_op_around_it() -> None:
    rules = load_policy("torch-cuda")
    assert rules.decide(OpFacts("conv2d.padding", "", "float16")).cast is Cast.LOWER
    assert rules.decide(OpFacts("square", "", "float16")).cast is Cast.FLOAT32
    mxnet = load_policy("mxnet-fp16")
    assert mxnet.decide(OpFacts("square", "", "float16")).rule == "mxnet-fp16/exp"
