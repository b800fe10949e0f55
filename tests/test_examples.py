"""Each example gives the answer that it states."""

from __future__ import annotations

import sys

import pytest

from ampaudit.audit.checks import Finding
from ampaudit.audit.scan import scan
from ampaudit.core.source_config import SourceConfig
from ampaudit.report.model import Report
from ampaudit.source.open import open_source
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"


def report_of(name: str, policy: str = "torch-cuda", **options: object) -> Report:
    source = open_source(str(EXAMPLES / name), SourceConfig(batches=2))
    return scan(source, policy=policy, dtype="float16", device="cpu", **options)  # type: ignore[arg-type]


def least_headroom(report: Report) -> float:
    return min(
        site.forward.headroom_bits
        for site in report.sites
        if site.forward is not None
        and site.forward.headroom_bits is not None
        and site.precision == "float16"
        and not site.by_design
    )


def graver(report: Report) -> list[Finding]:
    """All but notes."""
    return [f for f in report.findings if f.severity != "note"]


@pytest.mark.parametrize("policy", ["torch-cuda", "half"])
def test_the_trained_sentence_model_is_healthy(policy: str) -> None:
    pytest.importorskip("transformers")
    report = report_of("sentence_encoder.py", policy)
    assert report.findings == ()
    assert report.run.batches == 2
    assert 7 < least_headroom(report) < 9.5
    assert all(output.sqnr_db is not None and output.sqnr_db > 50 for output in report.outputs)
    assert report.weights.working_bytes < report.weights.master_bytes


def test_the_sentence_model_keeps_its_meaning() -> None:
    """Cosines between sentences in 16 bits equal those in FP32 to three digits: a check end to end."""
    pytest.importorskip("transformers")
    import torch

    from ampaudit.core.formats import FLOAT16
    from ampaudit.policy import load_policy
    from ampaudit.trace import TraceConfig, trace
    from tests.support.native import run_converted

    source = open_source(str(EXAMPLES / "sentence_encoder.py"), SourceConfig())
    batch = source.batches[0]
    rules = load_policy("torch-cuda")
    traced = trace(source.model, batch.args, batch.kwargs, TraceConfig(rules, rules, FLOAT16))
    with torch.no_grad():
        low = run_converted(traced, list(batch.kwargs.values()))[0].float()
        full = source.model(**batch.kwargs).last_hidden_state
    low, full = (torch.nn.functional.normalize(t.mean(1), dim=-1) for t in (low, full))
    torch.testing.assert_close(low @ low.T, full @ full.T, atol=1e-3, rtol=0)


def test_the_t5_feed_forward_overflows_in_two_blocks() -> None:
    report = report_of("t5_feed_forward.py")
    assert [(f.layer, f.code) for f in graver(report)] == [
        ("blocks.1.wo", "AMP101"),
        ("blocks.2.wo", "AMP101"),
    ]
    for finding in graver(report):
        assert finding.source is not None
        assert finding.source.code == "return x + self.wo(hidden)"
    assert report_of("t5_feed_forward.py", "half").findings[0].layer == "blocks.1.wo"


def test_the_eager_scores_overflow_in_one_layer() -> None:
    for policy in ("torch-cuda", "half"):
        report = report_of("attention_scores.py", policy)
        assert [f.site for f in graver(report)] == ["blocks.1.attention/matmul"]
        assert report.findings[0].source is not None
        assert "torch.matmul(q, k" in report.findings[0].source.code


def test_the_digits_network_learns_and_is_healthy() -> None:
    pytest.importorskip("sklearn")
    report = report_of("digits_cnn.py")
    assert report.findings == ()
    assert least_headroom(report) > 8
    source = open_source(str(EXAMPLES / "digits_cnn.py"), SourceConfig())
    assert sys.modules[type(source.model).__module__].accuracy(source.model) > 0.9


def test_mean_pooling_leaves_the_format_at_a_known_length() -> None:
    report = scan(
        str(EXAMPLES / "mean_pooling.py"), policy="half", device="cpu", sweep="length=64,256,1024,4096,32768"
    )
    assert report.sweep is not None
    assert [value.verdict for value in report.sweep.values] == ["pass"] * 4 + ["fail"]
    assert [growth.crossing for growth in report.sweep.growth] == [32_760]
