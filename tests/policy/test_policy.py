"""Policies: torch-cuda against the dispatcher, rule files and their mistakes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ampaudit.core.errors import PolicyError
from ampaudit.policy import OpFacts, load_file, load_policy, policy_names
from ampaudit.policy.schema import Cast
from tests.support.rule_file import GOOD


def test_torch_cuda_names_exactly_the_ops_that_the_dispatcher_registers() -> None:
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCUDA")
    names = {
        name.removeprefix("aten::").removesuffix(".default")
        for name in registered
        if name.startswith("aten::")
    }
    assert load_policy("torch-cuda").op_names == names


@pytest.mark.parametrize(
    ("op", "cast"),
    [
        ("linear", Cast.LOWER),
        ("softmax.int", Cast.SET_DTYPE),
        ("layer_norm", Cast.FLOAT32),
        ("norm.Scalar", Cast.APPEND_DTYPE),
        ("index_put", Cast.WIDEST),
        ("binary_cross_entropy", Cast.FORBID),
        ("add.Tensor", Cast.FOLLOW),
        ("gelu", Cast.FOLLOW),
        ("mean.dim", Cast.FOLLOW),
    ],
)
def test_decisions_of_torch_cuda(op: str, cast: Cast) -> None:
    decision = load_policy("torch-cuda").decide(OpFacts(op, "layer", "float16"))
    assert decision.cast is cast
    assert decision.why
    assert decision.explicit is (cast is not Cast.FOLLOW)


def test_shipped_policies_load() -> None:
    assert len(policy_names()) == 21
    for name in policy_names():
        loaded = load_file(name)
        assert loaded.file.name == name
        assert not loaded.warnings


def test_first_matching_rule_decides(tmp_path: Path) -> None:
    path = tmp_path / "mine.yaml"
    path.write_text(GOOD)
    rules = load_policy(str(path))
    assert rules.decide(OpFacts("linear", "head.0", "float16")).rule == "head"
    assert rules.decide(OpFacts("linear", "body", "float16")).rule == "linear"
    assert rules.decide(OpFacts("linear", "body", "bfloat16")).rule is None


def test_unknown_names_get_a_suggestion() -> None:
    with pytest.raises(PolicyError, match="unknown policy 'torch-cud'") as caught:
        load_policy("torch-cud")
    assert "did you mean 'torch-cuda'?" in caught.value.hint
