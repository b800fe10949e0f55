"""Tests of scans at several sizes: verdicts, extrapolations that are checked by running, and bad input."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

import ampaudit
from ampaudit.audit.config import ScanConfig
from ampaudit.core.assumptions import parse_sweep
from ampaudit.core.errors import AuditError, InputError, SourceError, UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.render.html.page import to_html
from ampaudit.render.render import FORMAT_REGISTRY, formats_of
from ampaudit.report.model import Report
from ampaudit.source.generated_inputs import resize_batches

Write = Callable[[str], Path]
# 3 per token, so that the sum is 65,520 with 21,840 tokens
SUMS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x):
        total = (x * self.scale).sum(-1)  # planted
        return total / x.shape[-1] + 1 / x.sum(-1)

def get_model():
    return Model()
"""
LENGTH = "\ndef example_inputs(length=8):\n    return torch.ones(2, length)\n"


class Sums(nn.Module):
    """The same in this file, and limited to 40,000 tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        if x.shape[-1] > 40_000:
            raise ValueError("too long")
        return (x * self.scale).sum(-1) / x.shape[-1]


def inputs(length: int) -> Tensor:
    return torch.ones(2, length)


def swept(values: list[int], **options: Any) -> Report:
    options = {"policy": "half", "device": "cpu", **options}
    return ampaudit.scan(Sums(), inputs, sweep={"length": values}, **options)


def test_each_size_has_a_verdict_and_the_worst_is_reported() -> None:
    report = swept([64, 1024, 30_000])
    assert report.sweep is not None
    assert [(v.value, v.verdict) for v in report.sweep.values] == [
        (64, "pass"),
        (1024, "pass"),
        (30_000, "fail"),
    ]
    assert report.sweep.shown == 30_000
    assert report.exit_code == 1
    assert [f.site for f in report.findings if f.severity == "error"] == ["(top)/sum"]
    assert report.sweep.values[2].breaks == ("(top)/sum",)
    (growth,) = (found for found in report.sweep.growth if found.site == "(top)/sum")
    assert not growth.extrapolated
    assert growth.crossing == 21_840
    assert "AMP120" not in [f.code for f in report.findings]


def test_an_extrapolated_overflow_is_there_when_it_is_run() -> None:
    report = swept([64, 256, 1024, 4096])
    assert report.sweep is not None
    soonest = report.sweep.soonest
    assert soonest is not None
    assert (soonest.site, soonest.crossing, soonest.form) == ("(top)/sum", 21_840, "power")
    assert soonest.peaks == (192.0, 768.0, 3072.0, 12288.0)
    (warning,) = (f for f in report.findings if f.code == "AMP120")
    assert "21,840" in warning.cause
    assert warning.source is not None
    assert warning.source.line == Sums.forward.__code__.co_firstlineno + 3
    assert (report.verdict, report.exit_code) == ("pass", 0)
    assert swept([soonest.low - 16]).exit_code == 0  # float16 holds multiples of 16 there
    assert swept([soonest.crossing]).exit_code == 1


def test_the_warning_counts_for_fail_on_and_can_be_ignored() -> None:
    sizes = [64, 256, 1024, 4096]
    assert swept(sizes, fail_on="warning").exit_code == 1
    ignored = swept(sizes, fail_on="warning", ignore=("AMP120",))
    assert ignored.exit_code == 0
    assert [(f.code, f.suppressed) for f in ignored.findings] == [("AMP120", "--ignore AMP120")]


def test_a_comment_hides_the_warning(model_file: Write) -> None:
    body = SUMS.replace("# planted", "# ampaudit: ignore[AMP120] short inputs only")
    report = ampaudit.scan(
        str(model_file(body + LENGTH)), sweep="length=64,256,1024", policy="half", device="cpu"
    )
    assert {f.site: f.suppressed for f in report.findings if f.code == "AMP120"} == {
        "(top)/sum": "comment: short inputs only",
        "(top)/sum#2": None,  # 65,520 ones
    }
    assert "AMP991" not in [f.code for f in report.findings]


class Chunks(nn.Module):
    """Sums chunks of 128 tokens one by one, so that a longer input has more ops, and then all of them."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(3.0))

    def forward(self, x: Tensor) -> Tensor:
        parts = [chunk.sum(-1, keepdim=True) for chunk in (x * self.scale).split(128, 1)]
        whole = torch.cat(parts, 1).sum(-1)
        return whole / x.shape[-1]


def test_ops_that_a_longer_input_repeats_are_not_confused() -> None:
    options: dict[str, Any] = {"policy": "half", "device": "cpu", "sweep": "length=256,512,1024,2048"}
    sweep = ampaudit.scan(Chunks(), inputs, **options).sweep
    assert sweep is not None
    (growth,) = sweep.growth
    assert growth.peaks == (768.0, 1536.0, 3072.0, 6144.0)
    assert growth.crossing == 21_840
    assert growth.site == "(top)/sum#17"


def test_two_sizes_are_not_extrapolated() -> None:
    report = swept([64, 4096])
    assert report.sweep is not None
    assert report.sweep.growth == ()


def test_a_size_at_which_the_model_fails_is_named_and_the_others_count() -> None:
    report = swept([64, 256, 1024, 50_000])
    assert report.sweep is not None
    last = report.sweep.values[-1]
    assert (last.value, last.verdict) == (50_000, "not run")
    assert "ValueError: too long" in last.problem
    assert report.exit_code == 0
    assert report.sweep.soonest is not None
    with pytest.raises(SourceError, match="too long"):
        swept([50_000, 60_000])


def test_several_policies_are_swept_together(tmp_path: Path) -> None:
    made = ampaudit.scan(
        Sums(), inputs, policy=["half", "apex-o0"], sweep={"length": [64, 30_000]}, device="cpu"
    )
    verdicts = [[v.verdict for v in report.sweep.values] for report in made.reports if report.sweep]
    assert verdicts == [["pass", "fail"], ["pass", "pass"]]
    made.save(tmp_path / "report.txt")
    text = " ".join((tmp_path / "report.txt").read_text(encoding="utf-8").split())
    assert "half length 64 passes, 30000 fails" in text
    assert made.exit_code == 1


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("length", "no values"),
        ("length=", "no values"),
        ("=3", "no axis"),
        ("a b=3", "'a b' is not the name of an axis"),
        ("length=a", "'a' is not a size"),
        ("length=4.5", "'4.5' is not a size"),
        ("length=-1", "'-1' is not a size"),
        ("length=0", "'0' is not a size"),
        ("length=" + "9" * 30, "is not a size"),
        ("length=4,4", "do not increase"),
        ("length=4,2", "do not increase"),
        ("length=4;batch=2", "one axis at a time"),
    ],
)
def test_a_sweep_of_another_form_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        parse_sweep(text)
    assert str(caught.value).count("\n") == 1
    assert "--sweep length=64,256,1024" in str(caught.value)


@pytest.mark.parametrize("given", [{"length": [64, 256]}, {"length": (64, 256)}, "length= 64 ,256"])
def test_python_and_text_say_the_same(given: Any) -> None:
    assert parse_sweep(ScanConfig.read({"sweep": given}).sweep) == ("length", (64, 256))


@pytest.mark.parametrize(
    "given", [{"length": 64.5}, {"length": [True]}, {"length": "ab"}, {}, {"a": [1], "b": [2]}]
)
def test_a_mapping_of_something_else_is_refused(given: Any) -> None:
    if given == {}:
        assert ScanConfig.read({"sweep": given}).sweep == ""
        return
    with pytest.raises(UsageError):
        ampaudit.scan(Sums(), inputs, sweep=given, device="cpu")


@pytest.mark.parametrize("option", ["ranges", "static"])
def test_options_without_effect_are_refused(option: str) -> None:
    with pytest.raises(UsageError, match=f"--(sweep|{option}) cannot be combined with --(sweep|{option}),"):
        swept([64], **{option: True})


def test_an_unknown_axis_lists_those_that_there_are(model_file: Write) -> None:
    path = str(
        model_file(SUMS + "\ndef example_inputs(rows=2, length=8):\n    return torch.ones(rows, length)\n")
    )
    with pytest.raises(UsageError, match="no axis 'width'") as caught:
        ampaudit.scan(path, sweep="width=1,2", device="cpu")
    assert "axes of these inputs: rows, length" in str(caught.value)
    fixed = str(model_file(SUMS + "\ndef example_inputs():\n    return torch.ones(2, 8)\n"))
    with pytest.raises(UsageError, match="no axis 'length'") as caught:
        ampaudit.scan(fixed, sweep="length=1,2", device="cpu")
    assert "def example_inputs(length=1)" in str(caught.value)


def test_inputs_of_one_size_cannot_be_swept(model_file: Write, tmp_path: Path) -> None:
    save_file({"input[0]": torch.ones(2, 8)}, tmp_path / "inputs.safetensors")
    loading = SourceConfig(inputs=tmp_path / "inputs.safetensors")
    with pytest.raises(UsageError, match="have no sizes to choose"):
        ampaudit.scan(str(model_file(SUMS + LENGTH)), sweep="length=1,2", device="cpu", source=loading)
    with pytest.raises(UsageError, match="have no sizes to choose"):
        ampaudit.scan(Sums(), torch.ones(2, 8), sweep="length=1,2", device="cpu")
    with pytest.raises(UsageError, match="no axis 'rows'"):
        ampaudit.scan(Sums(), inputs, sweep="rows=1,2", device="cpu")
    with pytest.raises(InputError, match="inputs is a function"):
        ampaudit.scan(Sums(), inputs, device="cpu")


class Running(nn.Module):
    """Has no parameters, and collects its input in memory that was zero."""

    def forward(self, x: Tensor) -> Tensor:
        memory = torch.zeros_like(x)
        memory[:, :] = x.cumsum(-1)
        return memory * x.shape[-1]


def test_values_that_depend_on_no_parameter_are_predicted() -> None:
    options: dict[str, Any] = {"policy": "half", "device": "cpu", "sweep": "length=16,32,64,128"}
    report = ampaudit.scan(Running(), inputs, **options)
    assert report.sweep is not None
    assert [round(value.headroom_bits or 0.0, 2) for value in report.sweep.values] == [8.0, 6.0, 4.0, 2.0]
    (growth,) = report.sweep.growth
    assert (growth.site, growth.crossing) == ("(top)/mul", 256)  # 256 * 256 = 65,536
    for size, verdict in ((255, "pass"), (256, "fail")):
        assert ampaudit.scan(Running(), inputs(size), policy="half", device="cpu").verdict == verdict


class Gram(nn.Module):
    """Multiplies its input with itself: 9 times the length, which is 65,520 with 7,280."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        nn.init.eye_(self.inner.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return (y.mT @ y) / x.shape[-2]


def threes(length: int) -> Tensor:
    return torch.full((1, length, 8), 3.0)


@pytest.mark.parametrize("sizes", [[64, 256, 1024], [64, 256, 1024, 16_384]])
@pytest.mark.parametrize("policy", ["ampaudit", "torch-cuda"])
def test_what_the_policy_would_keep_in_float32_is_no_overflow(policy: str, sizes: list[int]) -> None:
    """The default policy measures at each size; CUDA autocast does not."""
    measures = policy == "ampaudit"
    report = ampaudit.scan(Gram(), threes, sweep={"length": sizes}, policy=policy, device="cpu")
    assert report.sweep is not None
    (growth,) = (growth for growth in report.sweep.growth if growth.site == "(top)/matmul")
    assert (growth.crossing, growth.promoted) == (7280, measures)
    ahead = len(sizes) == 3 and not measures
    assert ("AMP120" in [f.code for f in report.findings]) is ahead
    assert ("would overflow" in str(report)) is ahead
    assert ("the policy keeps it in float32 there" in str(report)) is measures
    there = ampaudit.scan(Gram(), threes(growth.crossing), policy=policy, device="cpu")
    assert there.verdict == ("pass" if measures else "fail")


def test_masks_among_the_inputs_are_no_data() -> None:
    """A mask of 0 and 1, and one that is ready to be added, leave the headroom to the scores."""

    class Masked(nn.Module):
        def forward(self, x: Tensor, keep: Tensor, added: Tensor) -> Tensor:
            scores = x + (1.0 - keep) * torch.finfo(x.dtype).min
            return torch.cat([scores, x + added]).softmax(-1)

    keep = torch.ones(2, 8)
    keep[:, 5:] = 0.0
    added = torch.where(keep == 0.0, -65504.0, 0.0)
    report = ampaudit.scan(Masked(), (torch.ones(2, 8) * 3, keep, added), policy="half", device="cpu")
    assert [f.code for f in report.findings] == []
    assert report.least_headroom is not None
    assert report.least_headroom.headroom_bits is not None
    assert report.least_headroom.headroom_bits > 10
    data = ampaudit.scan(Masked(), (-60000 * torch.ones(2, 8), keep, keep), policy="half", device="cpu")
    assert "AMP102" in [f.code for f in data.findings]


@pytest.mark.parametrize(
    "functions",
    [
        LENGTH,
        "\ndef batches(length):\n    yield torch.ones(2, length)\n",
        "\ndef example_inputs():\n    return ()\n"
        "def example_kwargs(length=1):\n    return {'x': torch.ones(2, length)}\n",
    ],
)
def test_files_and_files_of_inputs_take_the_size(model_file: Write, functions: str, tmp_path: Path) -> None:
    alone = ampaudit.scan(
        str(model_file(SUMS + functions)), sweep="length=64,30000", policy="half", device="cpu"
    )
    apart = tmp_path / "inputs.py"
    apart.write_text(f"import torch\n{functions}", encoding="utf-8")
    loading = SourceConfig(inputs=apart)
    path = str(model_file(SUMS))
    beside = ampaudit.scan(path, sweep="length=64,30000", policy="half", device="cpu", source=loading)
    for report in (alone, beside):
        assert report.sweep is not None
        assert [v.verdict for v in report.sweep.values] == ["pass", "fail"]


def test_made_inputs_are_repeated_or_cut() -> None:
    ids, mask = torch.arange(10).view(2, 5), torch.ones(2, 5).long()
    batch = {"input_ids": ids, "attention_mask": mask, "pixel_values": torch.ones(2, 3, 4, 4)}
    (made,) = resize_batches([batch], [], {"length": 12, "batch": 3})
    assert made.kwargs["input_ids"].tolist()[2] == [0, 1, 2, 3, 4, 0, 1, 2, 3, 4, 0, 1]
    assert made.kwargs["attention_mask"].shape == (3, 12)
    assert made.kwargs["pixel_values"].shape == (3, 3, 4, 4)
    (made,) = resize_batches([batch], [], {"length": 2})
    assert made.kwargs["input_ids"].tolist() == [[0, 1], [5, 6]]
    with pytest.raises(UsageError, match="no axis 'length'"):
        resize_batches([{"pixel_values": batch["pixel_values"]}], [], {"length": 2})


def test_every_format_shows_each_size(tmp_path: Path) -> None:
    report = swept([64, 256, 1024, 4096])
    for form in formats_of("scan"):
        assert FORMAT_REGISTRY[form] is not None
    for suffix in (".html", ".md", ".txt", ".json"):
        report.save(tmp_path / f"report{suffix}")
        text = (tmp_path / f"report{suffix}").read_text(encoding="utf-8")
        assert "21840" in text.replace(",", "")
        assert all(f"{value:,}" in text or str(value) in text for value in (64, 256, 1024, 4096))
    assert "<polyline" in to_html(report)
    table = json.loads((tmp_path / "report.json").read_text(encoding="utf-8"))["sweep"]
    assert table["axis"] == "length"
    assert [value["verdict"] for value in table["values"]] == ["pass"] * 4


def test_an_error_of_the_inputs_is_one_line() -> None:
    def broken(length: int) -> Tensor:
        raise RuntimeError(f"nothing of {length}")

    with pytest.raises(AuditError, match="nothing of 64") as caught:
        ampaudit.scan(Sums(), broken, sweep="length=64", device="cpu")
    assert str(caught.value).count("\n") <= 1
