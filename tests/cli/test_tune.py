"""``ampaudit tune``: what it writes, what it refuses, and that other commands agree with it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import load_file
from torch import nn

import ampaudit
from ampaudit.cli.program import main
from ampaudit.core.errors import AuditError
from tests.support.paths import ROOT

ATTENTION = str(ROOT / "examples" / "attention_scores.py")
CNN = str(ROOT / "examples" / "digits_cnn.py")
T5 = str(ROOT / "examples" / "t5_feed_forward.py")


def run_cli(*arguments: str) -> Result:
    return CliRunner().invoke(main, arguments)


def refused(*arguments: str) -> AuditError:
    error = run_cli(*arguments).exception
    assert isinstance(error, AuditError)
    assert error.exit_code == 2
    return error


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a policy for the CNN in bfloat16 of which each member is needed."""
    path = tmp_path_factory.mktemp("tuned") / "policy.yaml"
    done = run_cli("tune", CNN, "--min-sqnr", "52", "--dtype", "bfloat16", "--exhaustive", "-o", str(path))
    assert done.exit_code == 0, done.output
    assert "PASS" in done.output
    return path


def accepted(policy: Path) -> bool:
    return ampaudit.scan(CNN, policy=str(policy), dtype="bfloat16", min_sqnr=52.0).exit_code == 0


def test_check_accepts_the_policy(tuned: Path) -> None:
    options = ("--policy", str(tuned), "--dtype", "bfloat16")
    assert run_cli("check", CNN, *options, "--min-sqnr", "52").exit_code == 0
    assert run_cli("check", CNN, *options, "--min-sqnr", "70").exit_code == 1


def test_the_policy_is_accepted_and_each_member_is_needed(tuned: Path, tmp_path: Path) -> None:
    assert accepted(tuned)
    data = yaml.safe_load(tuned.read_text())
    (rule,) = data["rules"]
    assert rule["match"]["site"], "a policy without members shows nothing"
    for site in rule["match"]["site"]:
        left = [other for other in rule["match"]["site"] if other != site]
        fewer = tmp_path / "fewer.yaml"
        fewer.write_text(yaml.safe_dump(data | {"rules": [rule | {"match": {"site": left}}] if left else []}))
        assert not accepted(fewer), site


def test_the_report_and_the_policy_are_the_same_choice(tmp_path: Path) -> None:
    done = run_cli("tune", ATTENTION, "--min-sqnr", "60", "--format", "json")
    data = json.loads(done.stdout)
    assert (done.exit_code, data["kind"], data["reached"]) == (0, "tuning", True)
    policy = tmp_path / "policy.yaml"
    policy.write_text(data["policy"])
    report = ampaudit.scan(ATTENTION, policy=str(policy), min_sqnr=60.0)
    assert report.exit_code == 0
    assert report.outputs[0].sqnr_db == data["measured_db"]
    low = {site.site for site in report.low_precision_sites}
    assert low, "nothing in 16 bits is no result"
    assert not low & {kept["site"] for kept in data["kept"]}
    assert data["lower_bound"] <= len(data["kept"])


def test_an_accuracy_that_only_float32_has_keeps_everything() -> None:
    report = ampaudit.tune(CNN, min_sqnr=300.0)
    assert report.reached
    assert report.measured_db is None
    assert len(report.kept) == report.ops


def test_convert_stores_every_weight_in_16_bits_that_the_accuracy_does_not_need(tmp_path: Path) -> None:
    directory = tmp_path / "out"
    done = run_cli("convert", T5, "--tune", "60", "-o", str(directory))
    assert done.exit_code == 0, done.output
    stored = load_file(directory / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert json.loads((directory / "report.json").read_text())["outputs"][0]["sqnr_db"] >= 60
    assert run_cli("verify", str(directory)).exit_code == 0


class Choice(nn.Module):
    """Returns a class instead of scores."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(16, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.layers(x) - self.layers(x * 0)
        return scores.argmax(-1)


def test_integer_outputs_ask_for_a_metric() -> None:
    with pytest.raises(AuditError, match="has a gradient") as caught:
        ampaudit.tune(Choice().eval(), torch.randn(8, 16))
    assert "--metric-drop" in (caught.value.hint or "")


def test_a_metric_of_integer_outputs_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "model.py"
    path.write_text(
        "import torch\n"
        "from tests.cli.test_tune import Choice\n"
        "def get_model(): return Choice().eval()\n"
        "def example_inputs(): return torch.randn(512, 16, generator=torch.Generator().manual_seed(1))\n"
        "def metric(output, batch): return (output == get_model()(batch)).float().mean()\n"
    )
    report = ampaudit.tune(path, metric_drop=0.0, dtype="bfloat16")
    assert report.reached
    assert report.metric == (1.0, 1.0)
    assert 0 < len(report.kept) < report.ops, "all of it, or nothing, needs no search"
    assert any(tried.reached is False for tried in report.tried)


def test_auto_takes_the_format_that_needs_less_float32() -> None:
    both = {dtype: ampaudit.tune(ATTENTION, min_sqnr=40.0, dtype=dtype) for dtype in ("float16", "bfloat16")}
    assert len(both["bfloat16"].kept) < len(both["float16"].kept), "the scores leave float16's range"
    assert ampaudit.tune(ATTENTION, min_sqnr=40.0, dtype="auto").dtype == "bfloat16"


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--min-sqnr", "40", "--metric-drop", "0"], "two goals"),
        (["--metric-drop", "0"], "has no metric"),
        (["--for", "h100"], "add --cost time"),
        (["--min-sqnr", "nan"], "nan"),
        (["--cost", "time", "--for", "no-such-device"], "no-such-device"),
    ],
)
def test_options_that_contradict_are_refused_in_one_line(arguments: list[str], says: str) -> None:
    error = refused("tune", ATTENTION, *arguments)
    assert says in f"{error} {error.hint}"


def test_a_converted_directory_is_refused(tmp_path: Path) -> None:
    assert run_cli("convert", CNN, "-o", str(tmp_path / "out")).exit_code == 0
    assert "casts in its program" in str(refused("tune", str(tmp_path / "out")))


def test_a_policy_file_is_not_overwritten(tmp_path: Path) -> None:
    path = tmp_path / "policy.yml"
    path.write_text("mine")
    assert "exists" in str(refused("tune", ATTENTION, "-o", str(path)))
    assert path.read_text() == "mine"


@pytest.mark.gpu
def test_a_policy_that_is_searched_in_emulation_holds_on_a_gpu() -> None:
    report = ampaudit.tune(ATTENTION, min_sqnr=60.0, device="cuda")
    assert (report.device, report.reached) == ("cuda", True)
    assert report.low_broken, "the scores leave float16's range"
    assert 0 < len(report.kept) < report.ops
