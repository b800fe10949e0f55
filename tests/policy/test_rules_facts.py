"""The shipped policies against the lists of their systems, which are in tests/data/policy_facts.json."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from ampaudit.core.formats import FLOAT16
from ampaudit.policy import OpFacts, RuleSet, load_file, load_policy
from ampaudit.policy.load import load_vocabulary, profiles, starting_scale
from ampaudit.policy.schema import Cast, aten_names, expand, inner_op
from tests.support.paths import DATA

FACTS: dict[str, Any] = json.loads((DATA / "policy_facts.json").read_text())


def casts(rules: RuleSet, ops: tuple[str, ...], dtype: str) -> set[Cast]:
    return {rules.decide(OpFacts(op, "layer", dtype)).cast for op in ops}


def assert_listed(policy: str, vocabulary: str, names: list[str], cast: Cast, dtype: str = "float16") -> int:
    """Every name is in the vocabulary, and the policy gives its ATen ops the class of its list."""
    words, rules = load_vocabulary(vocabulary), load_policy(policy)
    missing = [name for name in names if name not in words]
    assert not missing, f"not in vocabulary/{vocabulary}.yaml: {missing}"
    wrong = {n: casts(rules, words[n], dtype) for n in names if words[n]}
    assert not {name: found for name, found in wrong.items() if found != {cast}}
    return len(wrong)


@pytest.mark.parametrize(
    ("policy", "key", "dtype"),
    [("mxnet-fp16", "float16", "float16"), ("mxnet-bf16", "bfloat16", "bfloat16")],
)
def test_mxnet(policy: str, key: str, dtype: str) -> None:
    lists = FACTS["mxnet"][key]
    assert assert_listed(policy, "mxnet", lists["low"], Cast.LOWER, dtype) >= 3
    assert assert_listed(policy, "mxnet", lists["FP32_FUNCS"], Cast.FLOAT32, dtype) > 50
    assert assert_listed(policy, "mxnet", lists["WIDEST_TYPE_CASTS"], Cast.WIDEST, dtype) > 3
    neutral = [name for name in lists["neutral"] if name not in ("BatchNorm", "Activation")]
    assert assert_listed(policy, "mxnet", neutral, Cast.NARROWEST, dtype) > 15
    assert_listed(policy, "mxnet", ["BatchNorm"], Cast.FOLLOW, dtype)
    conditional = [f"{c['op']}({value})" for c in lists["CONDITIONAL_FP32_FUNCS"] for value in c["values"]]
    assert assert_listed(policy, "mxnet", conditional, Cast.FLOAT32, dtype) == len(conditional) > 0


def test_mxnet_activation_type_decides() -> None:
    rules = load_policy("mxnet-fp16")
    found = {op: casts(rules, (op,), "float16") for op in ("elu", "selu", "softplus", "gelu", "leaky_relu")}
    assert found["elu"] == found["selu"] == found["softplus"] == {Cast.FLOAT32}
    assert found["gelu"] == found["leaky_relu"] == {Cast.NARROWEST}
    assert casts(load_policy("mxnet-bf16"), ("elu", "softplus"), "bfloat16") == {Cast.NARROWEST}


@pytest.mark.parametrize(("key", "dtype"), [("fp16", "float16"), ("bf16_onednn", "bfloat16")])
def test_tensorflow(key: str, dtype: str) -> None:
    lists = FACTS["tensorflow"][key]
    allow = lists["allow"] + [op for group in lists.get("allow_conditional", []) for op in group["ops"]]
    assert assert_listed("tensorflow", "tensorflow", allow, Cast.ALLOW, dtype) >= 5
    for color in (Cast.INFER, Cast.DENY, Cast.CLEAR):
        assert assert_listed("tensorflow", "tensorflow", lists[color.value], color, dtype) >= 3
    onednn = [op for group in lists.get("infer_conditional", []) for op in group["ops"]]
    assert_listed("tensorflow", "tensorflow", onednn, Cast.FLOAT32, dtype)  # only where oneDNN runs float16


def test_paddle() -> None:
    facts = FACTS["paddle"]
    white, black, extra = facts["WHITE_LIST"], facts["FP16_BLACK_LIST"], facts["EXTRA_BLACK_LIST"]
    assert facts["BF16_BLACK_LIST"] == black
    for dtype in ("float16", "bfloat16"):
        assert assert_listed("paddle-o1", "paddle", white, Cast.LOWER, dtype) > 4
        assert assert_listed("paddle-o1", "paddle", black + extra, Cast.FLOAT32, dtype) > 30
        assert assert_listed("paddle-od", "paddle", white, Cast.LOWER, dtype) > 4
        assert_listed("paddle-od", "paddle", black, Cast.FLOAT32, dtype)
        assert_listed("paddle-o2", "paddle", extra, Cast.FLOAT32, dtype)
        assert_listed("paddle-o2", "paddle", white + black, Cast.LOWER, dtype)
    assert_listed("paddle-o1", "paddle", facts["FP16_WHITE_LIST"], Cast.LOWER)


def test_onnx() -> None:
    facts = FACTS["onnx"]
    assert assert_listed("onnx", "onnx", facts["DEFAULT_OP_BLOCK_LIST"], Cast.FLOAT32) >= 7
    words = load_vocabulary("onnx")
    others = [n for n in words if n not in facts["DEFAULT_OP_BLOCK_LIST"]]
    assert_listed("onnx", "onnx", others, Cast.LOWER)
    assert set(FACTS["onnxruntime"]["DEFAULT_OP_BLOCK_LIST"]) <= set(words)
    clip = load_file("onnx").file.weights.clip
    assert clip is not None
    defaults = facts["convert_float_to_float16"]
    assert (clip.max_finite, clip.min_positive) == (defaults["max_finite_val"], defaults["min_positive_val"])


def test_measured_thresholds() -> None:
    options = FACTS["modelopt"]["convert_to_mixed_precision"]
    evidence = [rule.when.evidence for rule in load_file("modelopt").file.rules if rule.when.evidence]
    above = [bound.above for e in evidence for bound in (e.weight_peak, e.input_peak, e.output_peak) if bound]
    assert above == [options["init_max"], options["data_max"], options["data_max"]]
    assert options["max_depth_of_reduction"] is None
    limit = FACTS["torch_tensorrt"]["options"]["autocast_max_output_threshold"]
    evidence = [rule.when.evidence for rule in load_file("torch-tensorrt").file.rules if rule.when.evidence]
    assert [b.above for e in evidence for b in (e.input_peak, e.consumer_peak) if b] == [limit, limit]
    assert not any(e.output_peak for e in evidence)  # a node's own output does not count there


def test_apex() -> None:
    lists = FACTS["apex"]["O1_lists"]
    low, high, widest = [], [], []
    for place in ("torch", "torch.nn.functional"):
        low += lists[place]["FP16_FUNCS"]
        high += lists[place]["FP32_FUNCS"]
        widest += lists[place].get("CASTS", []) + lists[place].get("SEQUENCE_CASTS", [])
    assert assert_listed("apex-o1", "apex", low + lists["rnn"]["FP16"], Cast.LOWER) > 20
    assert assert_listed("apex-o1", "apex", high, Cast.FLOAT32) > 40
    assert assert_listed("apex-o1", "apex", widest, Cast.WIDEST) > 15
    for name in lists["torch.Tensor"]["FP32_FUNCS"] + lists["torch.Tensor"]["CASTS"]:
        assert name in load_vocabulary("apex")
    assert assert_listed("apex-o1", "apex", ["binary_cross_entropy"], Cast.FORBID) == 1


def test_apex_levels() -> None:
    for level, facts in FACTS["apex"]["opt_levels"].items():
        file = load_file(f"apex-{level.lower()}").file
        assert (file.weights.storage == "lower") is (facts["cast_model_type"] == "float16")
        assert bool(file.rules) is facts["patch_torch_functions"]
        assert bool(file.weights.keep) is (facts["keep_batchnorm_fp32"] is True)
        scale = profiles()[str(file.loss_scale)].scale
        assert scale.kind == ("dynamic" if facts["loss_scale"] == "dynamic" else "static")
        if facts["master_weights"] is not None:
            assert file.weights.master is facts["master_weights"]


def test_torch_cpu_names_exactly_the_ops_that_the_dispatcher_registers() -> None:
    facts = FACTS["torch_cpu"]
    rules = load_policy("torch-cpu")
    for key, cast in (("lower_precision_fp", Cast.LOWER), ("fp32", Cast.FLOAT32), ("promote", Cast.WIDEST)):
        assert casts(rules, tuple(facts[key]), "bfloat16") == {cast}
    registered = torch._C._dispatch_get_registrations_for_dispatch_key("AutocastCPU")
    names = {n.removeprefix("aten::").removesuffix(".default") for n in registered if n.startswith("aten::")}
    # lstm.input ends in mkldnn_rnn_layer, which is not traced
    assert rules.op_names - {"lstm.input"} == names


def test_keep_fp32_patterns() -> None:
    keep = load_file("keep-fp32-modules").file.weights.keep
    expected = {
        (e["class"], tuple(f"*{p}*" for p in e["patterns"]), () if e["strict"] else ("float16",))
        for e in FACTS["transformers"]
    } | {(e["class"], tuple(f"*{p}*" for p in e["patterns"]), ()) for e in FACTS["diffusers"]}
    assert {(rule.model[0], rule.parameter, rule.dtype) for rule in keep} == expected


def test_loss_scale_profiles() -> None:
    names = {
        "torch GradScaler": "torch",
        "apex": "apex",
        "mxnet": "mxnet",
        "tf1 DynamicLossScale": "tensorflow",
        "deepspeed (config)": "deepspeed",
        "megatron-core": "megatron-core",
        "jmp": "jmp",
        "paddle GradScaler": "paddle",
        "paddle AmpScaler (base class default)": "paddle-base",
        "deepspeed unfused profile": "deepspeed-unfused",
    }
    assert set(names) == set(FACTS["loss_scalers"])
    for system, name in names.items():
        facts, scale = FACTS["loss_scalers"][system], profiles()[name].scale
        assert (scale.growth, scale.backoff, scale.interval) == (facts["up"], facts["down"], facts["window"])
        assert (scale.init, scale.min, scale.max) == (facts["init"], facts["min"], facts["max"])
        hysteresis = "caller" if facts["hysteresis"] == "delayed_shift" else facts["hysteresis"]
        assert scale.hysteresis == hysteresis


# what the matrix says of an op, as our casts; several systems do not list many of its ops
_WORDS = {
    "low": {Cast.LOWER},
    "white": {Cast.LOWER},
    "allow": {Cast.ALLOW},
    "fp32": {Cast.FLOAT32},
    "black": {Cast.FLOAT32},
    "black(speed)": {Cast.FLOAT32},
    "block": {Cast.FLOAT32},
    "deny": {Cast.DENY},
    "infer": {Cast.INFER},
    "clear": {Cast.CLEAR},
    "promote": {Cast.WIDEST},
    "banned": {Cast.FORBID},
    "fp32(out dtype)": {Cast.SET_DTYPE, Cast.APPEND_DTYPE},
}
_COLUMNS = {
    "torch_cuda": ("torch-cuda", None),
    "torch_cpu": ("torch-cpu", None),
    "apex_O1": ("apex-o1", "apex"),
    "mxnet_fp16": ("mxnet-fp16", "mxnet"),
    "mxnet_bf16": ("mxnet-bf16", "mxnet"),
    "tensorflow": ("tensorflow", "tensorflow"),
    "paddle_O1": ("paddle-o1", "paddle"),
    "onnxconverter": ("onnx", "onnx"),
}


@pytest.mark.parametrize("column", _COLUMNS)
def test_op_matrix(column: str) -> None:
    policy, vocabulary = _COLUMNS[column]
    rules = load_policy(policy)
    dtype = "bfloat16" if policy in ("mxnet-bf16", "torch-cpu") else "float16"
    checked = 0
    for row in FACTS["op_matrix"].values():
        expected = _WORDS.get(row[column])
        name = row["names"][(vocabulary or "torch")]
        if expected is None or name is None:
            continue
        ops = load_vocabulary(vocabulary).get(name, ()) if vocabulary else torch_ops(rules, name)
        if not ops:
            continue
        checked += 1
        assert casts(rules, ops, dtype) <= expected, (name, ops)
    assert checked >= 8


@pytest.mark.parametrize(
    ("column", "policy"), [("apex_O1", "apex-o1"), ("paddle_O1", "paddle-o1"), ("torch_cpu", "torch-cpu")]
)
def test_what_a_system_does_not_list_is_left_alone(column: str, policy: str) -> None:
    rules = load_policy(policy)
    dtype = "bfloat16" if policy == "torch-cpu" else "float16"
    checked = 0
    for row in FACTS["op_matrix"].values():
        name = row["names"]["torch"]
        if row[column] != "not listed" or name is None:
            continue
        ops = (name,) if name in aten_names() else expand(f"{name}.*")
        checked += 1
        assert casts(rules, ops, dtype) == {Cast.FOLLOW}, ops
    assert checked > 5


def torch_ops(rules: RuleSet, name: str) -> tuple[str, ...]:
    mentioned = {op for op in rules.op_names if op.partition(".")[0] == name}
    return tuple(op for op in mentioned if inner_op(op) is None)


@pytest.mark.parametrize(("name", "least"), [("torch", 0.0), ("apex", 0.0), ("deepspeed", 1.0)])
def test_a_loss_scale_falls_without_end_unless_the_system_has_one(name: str, least: float) -> None:
    assert starting_scale(name, FLOAT16).least == least
