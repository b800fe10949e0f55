"""The options of the commands are the fields of the configuration records, with the same defaults."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import click
import pytest
import torch

from ampaudit.audit.config import PlanConfig, ScanConfig
from ampaudit.benchmarking.config import BenchConfig
from ampaudit.ci.config import CheckConfig, read_config
from ampaudit.cli import loading
from ampaudit.cli.options import config_from, explicit_options
from ampaudit.core.config import Config, option_of
from ampaudit.core.errors import SourceError, UsageError
from ampaudit.core.source_config import SourceConfig
from ampaudit.export.config import ConvertConfig, VerifyConfig
from ampaudit.linter.config import LintConfig, read_lint_config
from ampaudit.report.compare import DiffConfig
from ampaudit.training.config import TrainConfig
from tests.support import cli as support

RECORDS = {
    "scan": (ScanConfig, SourceConfig),
    "plan": (PlanConfig, SourceConfig),
    "convert": (ConvertConfig, SourceConfig),
    "verify": (VerifyConfig,),
    "check": (CheckConfig,),
    "train": (TrainConfig,),
    "bench": (BenchConfig,),
    "lint": (LintConfig,),
    "diff": (DiffConfig,),
}
PAIRS = [(name, record) for name, records in RECORDS.items() for record in records]


def parsed(name: str, *words: str) -> click.Context:
    output = {"convert": ["-o", "out"], "diff": ["new.json"]}.get(name, [])
    return support.parsed(name, ["model.py", *output, *words])


@pytest.mark.parametrize(("name", "record"), PAIRS)
def test_without_options_a_record_has_its_defaults(name: str, record: type[Config]) -> None:
    params = {**parsed(name).params, "targets": ()}
    assert config_from(record, params) == record()


@pytest.mark.parametrize(("name", "record"), PAIRS)
def test_every_field_is_an_option(name: str, record: type[Config]) -> None:
    params = parsed(name).params
    wanted = {n for n, field in record.model_fields.items() if (o := option_of(field)) and o.command_line}
    assert wanted <= params.keys()


@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        ("fp16", torch.float16),
        ("half", torch.float16),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
    ],
)
def test_a_short_name_of_a_format_is_the_format(name: str, dtype: torch.dtype) -> None:
    for record in (ScanConfig, ConvertConfig, CheckConfig, TrainConfig, BenchConfig):
        assert getattr(torch, str(config_from(record, {"dtype": name}).dtype)) is dtype


@pytest.mark.parametrize("name", RECORDS)
def test_no_flag_stands_for_false(name: str) -> None:
    """Versions of click differ in what ``flag_value=False`` with a default of ``True`` gives."""
    flags = [p for p in parsed(name).command.params if isinstance(p, click.Option) and p.is_flag]
    assert flags
    assert not [flag.name for flag in flags if flag.flag_value is False or flag.default is True]


def test_options_of_every_type() -> None:
    words = ["--policy", "half", "--backward", "--min-sqnr", "30", "--stress", "2", "--ignore", "AMP101"]
    found = config_from(ScanConfig, parsed("scan", *words, "--ignore", "AMP102:head").params)
    assert found == ScanConfig(
        policy="half", backward=True, min_sqnr=30.0, stress=2, ignore=["AMP101", "AMP102:head"]
    )
    loading = config_from(SourceConfig, parsed("scan", "--train", "--weights", "w.pt").params)
    assert loading == SourceConfig(train=True, weights=Path("w.pt"))
    converting = config_from(ConvertConfig, parsed("convert", "--no-masters", "--mode", "train").params)
    assert converting == ConvertConfig(masters=False, mode="train")
    assert config_from(VerifyConfig, parsed("verify", "--no-run").params) == VerifyConfig(run=False)
    measuring = config_from(BenchConfig, parsed("bench", "--batch-size", "8,2", "--modes", "fp32").params)
    assert measuring == BenchConfig(sizes=[8, 2], modes=["fp32"])
    training = config_from(
        TrainConfig, parsed("train", "--policy", "half,apex-o2", "--loss-scale", "8").params
    )
    assert training == TrainConfig(policies=["half", "apex-o2"], loss_scale=8.0)


def test_what_is_given() -> None:
    with parsed("check", "-j", "2", "--min-sqnr", "0") as context:
        assert explicit_options(context.params).keys() == {"targets", "jobs", "min_sqnr"}


def test_a_value_that_does_not_fit_is_named_as_an_option() -> None:
    with pytest.raises(UsageError, match="--max-fp32-share 2"):
        config_from(CheckConfig, {"max_fp32_share": 2.0})


def test_every_key_of_pyproject(tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    text = "[tool.ampaudit]\n"
    values = {
        "jobs": "2",
        "batches": "3",
        "seed": "1",
        "timeout": "1.5",
        "train": "true",
        "fail-on": '"note"',
        "dtype": '"float16"',
    }
    values |= dict.fromkeys(("min-headroom", "min-sqnr", "max-metric-drop", "max-fp32-share"), "1.0")
    values |= dict.fromkeys(("allow", "ignore", "targets"), '["AMP101"]')
    for name, field in CheckConfig.model_fields.items():
        if (option := option_of(field)) and option.file:
            key = name.replace("_", "-")
            text += f"{key} = {values.get(key, chr(34) + 'cpu' + chr(34))}\n"
    path.write_text(text + '\n[tool.ampaudit.lint]\nselect = ["AMP8"]\n')
    found = read_config(path)
    assert found.keys() == CheckConfig.model_fields.keys() - {"trust", "update_baseline"}
    assert found["weights"] == tmp_path / "cpu"
    assert CheckConfig(**found).jobs == 2
    assert read_lint_config(path) == {"select": ("AMP8",)}
    path.write_text("[tool.ampaudit]\nmin_sqnr = 1\n")
    with pytest.raises(UsageError, match="no such key") as caught:
        read_config(path)
    assert "did you mean 'min-sqnr'" in caught.value.hint


@pytest.mark.parametrize(
    ("words", "setter"),
    [
        ([], "keep_freed_memory"),
        (["--memory", "1G"], "return_freed_memory"),
        (["--stream"], "return_freed_memory"),
    ],
)
def test_a_scan_returns_freed_memory_only_where_memory_is_limited(
    monkeypatch: pytest.MonkeyPatch, words: list[str], setter: str
) -> None:
    """Returning it to the system doubles the time of a scan whose values are large."""
    calls: list[str] = []
    for name in ("keep_freed_memory", "return_freed_memory"):
        monkeypatch.setattr(loading, name, partial(calls.append, name))
    with parsed("scan", *words) as context, pytest.raises(SourceError, match=r"model\.py"):
        context.invoke(context.command, **context.params)
    assert calls == [setter]
