"""The public names: complete, documented, loaded late, and alike; their options are those of the records."""

from __future__ import annotations

import ast
import importlib.util
import inspect
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import ampaudit
from ampaudit.audit.config import PlanConfig, ScanConfig
from ampaudit.benchmarking.config import BenchConfig
from ampaudit.ci.config import CheckConfig
from ampaudit.core.config import Config, option_of
from ampaudit.core.errors import InputError, PolicyError, UsageError
from ampaudit.export.config import ConvertConfig, VerifyConfig
from ampaudit.linter.config import LintConfig
from ampaudit.recording.config import RecordConfig
from ampaudit.render.render import as_file
from ampaudit.report.compare import DiffConfig
from ampaudit.training.config import TrainConfig
from ampaudit.tuning.config import TuneConfig
from ampaudit.views.verdict import verdict_words
from tests.support.paths import ROOT
from tests.support.saved import NAMES, saved
from tools.stub import stub_text

COMMANDS = {"scan", "plan", "convert", "verify", "check", "train", "bench", "lint", "diff"}
OTHERS = {"prepare", "watch", "scaler", "assert_safe", "load_policy", "read_report"}
RECORDS = [
    PlanConfig,
    ScanConfig,
    ConvertConfig,
    VerifyConfig,
    CheckConfig,
    TrainConfig,
    BenchConfig,
    LintConfig,
    DiffConfig,
    RecordConfig,
    TuneConfig,
]
MODEL = """
import torch
from torch import nn


def get_model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))


def example_inputs():
    return torch.linspace(-1, 1, 32).reshape(4, 8)


def loss(output):
    return output.float().square().mean()
"""


@pytest.fixture
def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "model.py").write_text(MODEL)
    return tmp_path / "model.py"


def test_all_names_the_public_names() -> None:
    names = set(ampaudit.__all__)
    assert names == set(dir(ampaudit))
    assert names >= COMMANDS | OTHERS
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = ampaudit.nothing


@pytest.mark.parametrize("name", sorted(set(ampaudit.__all__) - {"__version__"}))
def test_every_public_name_is_documented(name: str) -> None:
    value = getattr(ampaudit, name)
    text = inspect.getdoc(value) or ""
    assert text
    if inspect.isfunction(value):
        assert {part for part in ("Args:", "Returns:", "Raises:") if part not in text} == set()


def test_importing_the_package_or_a_record_does_not_import_torch() -> None:
    code = (
        "import sys, ampaudit\n"
        "print('pydantic' in sys.modules)\n"
        "ampaudit.ScanConfig, ampaudit.TrainConfig, ampaudit.BenchConfig, ampaudit.ConvertConfig\n"
        "ampaudit.lint([]), ampaudit.load_policy('half'), ampaudit.read_report, ampaudit.diff\n"
        "print('torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["False", "False"]


def test_no_public_name_is_also_that_of_a_package() -> None:
    # importing the package would put it in the place of the function
    assert not [name for name in ampaudit.__all__ if importlib.util.find_spec(f"ampaudit.{name}")]


# -- the records


def contents(stub: str) -> tuple[set[tuple[str | None, str, str | None]], list[str]]:
    """What a stub imports, in any order, and its functions."""
    body = ast.parse(stub).body
    imports = [node for node in body if isinstance(node, ast.ImportFrom)]
    return (
        {(node.module, alias.name, alias.asname) for node in imports for alias in node.names},
        [ast.dump(node) for node in body if isinstance(node, ast.FunctionDef)],
    )


def test_the_stub_is_what_is_written_from_the_records() -> None:
    stub = (ROOT / "ampaudit" / "__init__.pyi").read_text()
    assert contents(stub) == contents(stub_text()), "run `make stub`"


def test_the_stub_has_every_name_and_every_option() -> None:
    """Read apart from what writes it."""
    stub = ast.parse((ROOT / "ampaudit" / "__init__.pyi").read_text())
    imported = {a.asname for node in stub.body if isinstance(node, ast.ImportFrom) for a in node.names}
    functions = {node.name: node for node in stub.body if isinstance(node, ast.FunctionDef)}
    assert imported - {None} | functions.keys() == set(ampaudit.__all__)
    for name in sorted(COMMANDS | {"record", "tune"}):
        assert functions[name].args.kwarg is None
        parameters = inspect.signature(getattr(ampaudit, name)).parameters
        arguments = [*functions[name].args.args, *functions[name].args.kwonlyargs]
        assert {argument.arg for argument in arguments} == set(parameters)
    assert {a.arg for a in functions["assert_safe"].args.kwonlyargs} >= ScanConfig.model_fields.keys()


@pytest.mark.parametrize("record", RECORDS)
def test_every_field_says_what_it_is(record: type[Config]) -> None:
    for name, field in record.model_fields.items():
        option = option_of(field)
        assert option is not None, name
        assert "." in option.help, name


@pytest.mark.parametrize("name", sorted(COMMANDS | {"record", "tune"}))
def test_a_signature_shows_the_options_with_their_defaults(name: str) -> None:
    """As help() and a notebook show them; a type checker reads them from the stub."""
    parameters = inspect.signature(getattr(ampaudit, name)).parameters
    assert "options" not in parameters
    config = next(p for p in parameters.values() if p.name == "config")
    record = getattr(ampaudit, str(config.annotation).partition(" ")[0])()
    keywords = (p for p in parameters.values() if p.kind is inspect.Parameter.KEYWORD_ONLY)
    options = [p for p in keywords if p.name in type(record).model_fields and p.name != "policy"]
    assert len(options) >= 2
    for option in options:
        assert option.default == getattr(record, option.name)
    said = inspect.getdoc(getattr(ampaudit, name)) or ""
    assert all(f"    {option.name}: " in said.partition("Options:")[2] for option in options)


def test_a_record_is_frozen_and_says_what_does_not_fit() -> None:
    config = ScanConfig(policy="half", ignore=["AMP101"])
    with pytest.raises(Exception, match="frozen"):
        config.policy = "ampaudit"
    assert config.changed(seed=1).policy == "half"
    for options, message in (
        ({"min_sqnr": "40"}, "min_sqnr = '40'\n  next: it must be a number, 0 or more"),
        ({"polcy": "half"}, "polcy: no such option\n  next: did you mean 'policy'"),
        ({"device": "gpu"}, "--device gpu: unknown device\n  next: one of: auto, cpu, cuda"),
        ({"stress": -1}, "stress = -1\n  next: it must be a whole number, 0 or more"),
        ({"policy": None}, "policy = None\n  next: it must be a string, a path or a RuleSet"),
        ({"seed": True}, "seed = True\n  next: it must be a whole number"),
        (
            {"min_sqnr": math.nan},
            "min_sqnr = nan\n  next: it must be a number, 0 or more; nan is not a valid limit",
        ),
        ({"loss_scale": 0}, "loss_scale = 0\n  next: it must be a number above 0"),
        ({"loss": "mean"}, "loss = 'mean'\n  next: it must be a function"),
        ({"ignore": "AMP101"}, "it must be a list of strings"),
    ):
        with pytest.raises(UsageError) as caught:
            ScanConfig(**options)  # type: ignore[arg-type]
        assert message in str(caught.value)


@pytest.mark.parametrize(
    ("record", "options", "message"),
    [
        (TrainConfig, {"loss_scale": True}, "loss_scale = True\n  next: it must be a string or a number"),
        (TrainConfig, {"policies": 3}, "policies = 3\n  next: it must be a list of strings"),
        (BenchConfig, {"sizes": [1.5]}, "sizes = [1.5]\n  next: it must be a list of whole numbers"),
        (BenchConfig, {"sizes": [8, 0]}, "--batch-size 8,0: give positive integers"),
        (BenchConfig, {"sizes": "8,,2"}, "--batch-size 8,,2: give positive integers"),
        (BenchConfig, {"target": 3}, "target = 3\n  next: it must be a Device"),
        (VerifyConfig, {"tolerance_db": math.nan}, "nan is not a valid limit"),
        (DiffConfig, {"bits": -1}, "bits = -1\n  next: it must be a number, 0 or more"),
    ],
)
def test_each_record_says_what_does_not_fit(
    record: type[Config], options: dict[str, Any], message: str
) -> None:
    with pytest.raises(UsageError) as caught:
        record(**options)
    assert message in str(caught.value)


def test_paths_are_texts_or_paths(tmp_path: Path) -> None:
    for place in (tmp_path, str(tmp_path)):
        assert ScanConfig(stress_dir=place).stress_dir == tmp_path
        assert CheckConfig(policy=place).policy == place
        assert TrainConfig(policies=place).policies == (place,)
        assert TrainConfig(policies=[place]).policies == (place,)


def test_an_empty_policy_is_none_that_is_known() -> None:
    for policies in ("", "half,"):
        with pytest.raises(PolicyError, match="unknown policy ''"):
            ampaudit.train(ROOT / "examples" / "ci" / "model.py", policies=policies, steps=1)


# -- the functions


def test_the_record_of_another_command_is_refused(model: nn.Module) -> None:
    x = torch.ones(1, 8)
    wrong: Any
    for wrong in (PlanConfig(), {"policy": "half"}, "half"):
        with pytest.raises(UsageError, match=f"config is of type {type(wrong).__name__}") as caught:
            ampaudit.scan(model, x, config=wrong)
        assert caught.value.hint == "pass a ScanConfig"
    assert ampaudit.plan(model, x, config=ScanConfig(policy="half")).policy == "half"


@pytest.mark.parametrize("wrong", [None, 3, nn.Linear])
def test_what_is_no_model_is_refused(wrong: Any) -> None:
    with pytest.raises(InputError, match="the model is of type"):
        ampaudit.scan(wrong, torch.ones(1, 8))


def wrong_calls(model: Any, x: torch.Tensor) -> dict[str, Any]:
    optimizer = torch.optim.SGD(model.parameters())
    return {
        "the model is of type type\n  next: pass an instance": lambda: ampaudit.scan(nn.Linear, x),  # type: ignore[call-overload]
        "backend is of type str": lambda: ampaudit.scan(model, x, session=ampaudit.Session(backend="x")),
        "on_progress is of type int": lambda: ampaudit.Session(on_progress=3),  # type: ignore[arg-type]
        "keep_outputs is of type str": lambda: ampaudit.Session(keep_outputs="all"),  # type: ignore[arg-type]
        "batches is of type int\n  next: pass a list": lambda: ampaudit.scan(model, batches=3),  # type: ignore[call-overload]
        "batches is of type Tensor": lambda: ampaudit.scan(model, batches=x),  # type: ignore[call-overload]
        "batches is of type str": lambda: ampaudit.train(model, "x"),  # type: ignore[arg-type]
        "a dict whose keys are not names": lambda: ampaudit.scan(model, {1: x}),  # type: ignore[dict-item]
        "source is of type dict": lambda: ampaudit.scan(model, x, source={"seed": 1}),  # type: ignore[call-overload]
        "policy = \\[\\]": lambda: ampaudit.scan(model, x, policy=[]),
        "the policy is of type int": lambda: ampaudit.scan(model, x, policy=[3]),  # type: ignore[list-item]
        "not a 16-bit format": lambda: ampaudit.scan(model, x, dtype=torch.float32),
        "dtype is of type int": lambda: ampaudit.prepare(model, dtype=16),  # type: ignore[arg-type]
        "targets is missing": lambda: ampaudit.check([None]),  # type: ignore[list-item]
        "targets is of type NoneType": lambda: ampaudit.check(None),  # type: ignore[arg-type]
        "targets is of type Sequential": lambda: ampaudit.check([model]),
        "paths is of type NoneType": lambda: ampaudit.lint(None),  # type: ignore[arg-type]
        "paths is of type int": lambda: ampaudit.lint([3]),  # type: ignore[list-item]
        "output is missing": lambda: ampaudit.convert(model, x),
        "directory is missing": lambda: ampaudit.verify(None),  # type: ignore[arg-type]
        "path is missing": lambda: ampaudit.read_report(None),  # type: ignore[arg-type]
        "path is of type int": lambda: ampaudit.diff(3, 4),  # type: ignore[arg-type]
        "unknown loss-scale profile '3'": lambda: ampaudit.scaler(3),  # type: ignore[arg-type]
        "pass the module that is trained": lambda: ampaudit.prepare("model.py"),  # type: ignore[arg-type]
        "the optimizer is of type int": lambda: ampaudit.prepare(model, 3),  # type: ignore[arg-type]
        "NoneType is not a torch optimizer": lambda: ampaudit.watch(model, None),  # type: ignore[arg-type]
        "the model is of type NoneType": lambda: ampaudit.watch(None, optimizer),  # type: ignore[arg-type]
        "allow is of type int": lambda: ampaudit.assert_safe(model, x, allow=3),  # type: ignore[arg-type]
        "--allow AMP1O1": lambda: ampaudit.assert_safe(model, x, allow="AMP1O1"),
    }


def test_a_wrong_argument_is_named(model: nn.Module) -> None:
    for message, call in wrong_calls(model, torch.ones(1, 8)).items():
        with pytest.raises(ampaudit.AuditError, match=message) as caught:
            call()
        assert caught.value.hint


def test_a_session_receives_the_progress_of_each_call(model: nn.Module, path: Path, tmp_path: Path) -> None:
    phases: list[str] = []
    session = ampaudit.Session(on_progress=lambda phase, *_: phases.append(phase))
    x, out = torch.ones(1, 8), tmp_path / "out"
    for call, phase in (
        (lambda: ampaudit.assert_safe(model, x, session=session), "auditing"),
        (lambda: ampaudit.plan(model, x, session=session), "measuring"),
        (lambda: ampaudit.convert(model, x, out, session=session, program=False), "auditing"),
        (lambda: ampaudit.verify(out, session=session), "hashing MB of files"),
        (lambda: ampaudit.train(path, session=session, steps=1), "training"),
        (lambda: ampaudit.bench(model, x, session=session, modes="fp32", repeats=1), "timing batch size 1"),
        (lambda: ampaudit.check(path, session=session), "checking"),
    ):
        phases.clear()
        call()  # type: ignore[no-untyped-call]
        assert phase in phases


def test_a_torch_dtype_is_as_good_as_its_name(model: nn.Module, path: Path, tmp_path: Path) -> None:
    x, half = torch.ones(1, 8), torch.bfloat16
    assert ampaudit.scan(model, x, dtype=half).run.dtype == "bfloat16"
    assert {site.precision for site in ampaudit.plan(path, dtype=half).sites} >= {"bfloat16"}
    assert ampaudit.check(path, dtype=half).verdict == "pass"
    assert ampaudit.train(path, steps=1, dtype=half).dtype == "bfloat16"
    assert ampaudit.bench(path, modes="fp32", repeats=1, dtype=half).dtype == "bfloat16"
    _, made = ampaudit.convert(path, output=tmp_path / "out", dtype=half, program=False)
    assert made is not None
    assert made.dtype == "bfloat16"
    assert ampaudit.prepare(model, dtype=half).scaler.is_enabled() is False


def test_several_policies_are_compared(model: nn.Module, tmp_path: Path) -> None:
    x = torch.ones(1, 8)
    rules = ampaudit.load_policy("torch-cuda")
    file = tmp_path / "own.yaml"
    file.write_text("name: own\ntitle: own rules\nextends: [half]\n")
    several = ampaudit.scan(model, x, policy=["half", rules, file])
    assert isinstance(several, ampaudit.Comparison)
    assert [report.run.policy for report in several.reports] == ["half", "torch-cuda", "own"]
    one = ampaudit.scan(model, x, policy=["half"])
    assert [report.sites for report in one.reports] == [several.reports[0].sites]
    named: Any = ampaudit.scan(model, x, policy="half,torch-cuda")
    assert [report.run.policy for report in named.reports] == ["half", "torch-cuda"]
    assert ampaudit.scan(model, x, policy=file).run.policy == "own"
    assert ampaudit.scan(model, x, config=ScanConfig(policy=rules)).run.policy == "torch-cuda"


def test_python_loads_a_model_as_the_command_does(path: Path, tmp_path: Path) -> None:
    assert ampaudit.scan(path, backward=True).run.mode == "train"
    source = ampaudit.SourceConfig(train=True, seed=3)
    assert ampaudit.scan(path, source=source).run.mode == "train"
    state = {
        name: torch.zeros_like(value) for name, value in nn.Sequential(nn.Linear(8, 8)).state_dict().items()
    }
    torch.save(state, tmp_path / "weights.pt")
    for call in (ampaudit.scan, ampaudit.plan, ampaudit.bench, ampaudit.train, ampaudit.assert_safe):
        with pytest.raises(ampaudit.WeightsError):  # of another model
            call(path, source=ampaudit.SourceConfig(weights=tmp_path / "weights.pt"))  # type: ignore[operator]
    with pytest.raises(ampaudit.WeightsError):
        ampaudit.convert(
            path, output=tmp_path / "x", source=ampaudit.SourceConfig(weights=tmp_path / "weights.pt")
        )
    ampaudit.convert(path, output=tmp_path / "made", policy="half", dtype="bfloat16")
    again = ampaudit.scan(tmp_path / "made")
    assert (again.run.policy, again.run.dtype) == ("as-is", "bfloat16")


def test_training_takes_as_many_batches_as_it_has_steps(model: nn.Module) -> None:
    def endless() -> Any:
        while True:
            yield torch.ones(2, 8)

    trained = ampaudit.train(model, endless(), loss=lambda out: out.square().mean(), steps=2, policies="half")
    assert trained.steps == 2


def test_values_are_short_to_print(model: nn.Module) -> None:
    x = torch.ones(1, 8)
    report = ampaudit.scan(model, x, policy="half", backward=True, loss=lambda out: 1e9 * out.square().mean())
    optimizer = torch.optim.AdamW(model.parameters())
    prepared = ampaudit.prepare(model, optimizer)
    values = [report, *report.findings, *report.sites, report.coverage, report.backward, prepared]
    values += [prepared.scaler, ampaudit.watch(model, optimizer), ampaudit.load_policy("half")]
    values += [ScanConfig(policy="half"), *(site.forward for site in report.sites)]
    assert report.findings
    assert all(0 < len(repr(value)) < 320 for value in values)
    assert not any("\n" in repr(value) or " object at 0x" in repr(value) for value in values)
    assert repr(prepared) == "<Prepared Sequential, AdamW, <LossScaler 65,536, dynamic>>"
    assert repr(ScanConfig(policy="half", seed=1)) == "ScanConfig(policy='half', seed=1)"
    assert repr(report.findings[0]).startswith(f"<Finding error {report.findings[0].code} ")


def test_ignored_findings_are_counted(model: nn.Module) -> None:
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    with torch.no_grad():
        model[0].weight.fill_(30000.0)  # type: ignore[index,union-attr,operator]
    full = ampaudit.scan(model, x, policy="half")
    report = ampaudit.scan(model, x, policy="half", ignore=["AMP1", "amp2"])
    hidden = [f for f in report.findings if f.suppressed]
    assert {f.code for f in hidden} == {f.code for f in full.findings if f.code.startswith(("AMP1", "AMP2"))}
    assert {f.suppressed for f in hidden} <= {"--ignore AMP1", "--ignore amp2"}
    errors = full.count(ampaudit.Severity.ERROR)
    assert (full.verdict, report.verdict, report.ignored(ampaudit.Severity.ERROR)) == ("fail", "pass", errors)
    _, sentence = verdict_words(report)
    assert sentence.startswith("nothing else breaks in float16 (1 warning); output is broken")
    assert f"ignored: {errors} error" in sentence
    assert f"{len(hidden)} ignored" in report.headline
    with pytest.raises(UsageError, match="no check has the code 'AMPX'"):
        ampaudit.scan(model, x, ignore=["AMPX"])


def test_one_model_in_every_way(model: nn.Module, path: Path, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    report = ampaudit.scan(model, x, policy="half")
    assert ampaudit.scan(model, batches=[x], config=ScanConfig(policy="half")).sites == report.sites
    loaded = ampaudit.scan(path, config=ScanConfig(policy="half"))
    assert ampaudit.scan(str(path), policy="half").sites == loaded.sites
    assert ampaudit.plan(path).sites == ampaudit.plan(str(path)).sites
    made, conversion = ampaudit.convert(model, x, str(tmp_path / "out"), policy="half", program=False)
    assert conversion is not None
    assert made.verdict == "pass"
    assert ampaudit.verify(tmp_path / "out").problems == ()
    trained = ampaudit.train(path, steps=2, policies="half")
    assert [variant.name for variant in trained.variants] == ["fp32", "torch.amp", "half"]
    loss = torch.nn.functional.cross_entropy
    batches = [(x, torch.tensor([0, 1, 2, 3]))]
    wrapped = ampaudit.train(Classifier(model, loss), batches, steps=2, policies=["half"])
    assert wrapped.steps == 2
    row = ampaudit.bench(model, x, modes="fp32", repeats=1).rows[0]
    assert (row.mode, row.status) == ("fp32", "ok")


def test_a_session_in_python(model: nn.Module, tmp_path: Path) -> None:
    x = torch.linspace(-1, 1, 32).reshape(4, 8)
    with torch.no_grad():
        model[0].weight.fill_(30000.0)  # type: ignore[index,union-attr,operator]
    report = ampaudit.scan(model, x, policy="half")
    finding = report.findings[0]
    assert (report.exit_code, finding.severity, finding.layer) == (1, ampaudit.Severity.ERROR, "0")
    assert ampaudit.scan(model, x).promoted
    assert ampaudit.plan(model, x, policy="half").weights.after
    _, made = ampaudit.convert(model, x, tmp_path / "out", policy="torch-cuda", fail_on="never")
    assert made is not None
    assert ampaudit.read_report(tmp_path / "out").findings  # type: ignore[union-attr]
    with pytest.raises(ampaudit.UnsafeModel, match="not safe in float16"):
        ampaudit.assert_safe(model, x, policy="half")
    optimizer = torch.optim.AdamW(model.parameters())
    prepared = ampaudit.prepare(model, optimizer, policy="apex-o1", dtype="bfloat16")
    with ampaudit.watch(model, optimizer, every=1) as monitor:
        prepared.model(x).float().square().mean().backward()
        optimizer.step()
    assert len(monitor.health().steps) == 1


class Classifier(nn.Module):
    """Its output is the loss."""

    def __init__(self, model: nn.Module, loss: Any) -> None:
        super().__init__()
        self.model, self.loss = model, loss

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.loss(self.model(x), y)


def test_inputs_are_given_once(model: nn.Module) -> None:
    for options in ({}, {"inputs": torch.ones(1, 8), "batches": [torch.ones(1, 8)]}):
        with pytest.raises(InputError, match="give either inputs or batches"):
            ampaudit.scan(model, **options)  # type: ignore[arg-type]


def test_loading_leaves_the_random_state(path: Path) -> None:
    torch.manual_seed(3)
    before = torch.get_rng_state()
    ampaudit.scan(path)
    assert torch.equal(torch.get_rng_state(), before)


def test_check_lint_and_diff(path: Path, tmp_path: Path) -> None:
    found = ampaudit.check(path, policy="half", allow=["AMP207"], min_sqnr=1000.0)
    assert (found.verdict, found.targets[0].breaches[0].budget) == ("fail", "min-sqnr")
    with pytest.raises(UsageError, match="no target"):
        ampaudit.check()
    script = tmp_path / "train.py"
    script.write_text((ROOT / "examples" / "lint" / "finetune.py").read_text())
    assert "AMP807" in {finding.code for finding in ampaudit.lint(script).findings}
    assert {finding.code for finding in ampaudit.lint([script], select=["AMP807"]).findings} == {"AMP807"}
    reports = saved("policies").reports  # type: ignore[union-attr]
    assert ampaudit.diff(reports[2], reports[0]).exit_code == 1
    assert ampaudit.diff(reports[0], reports[0]).exit_code == 0


# -- in a notebook


@pytest.mark.parametrize("name", NAMES)
def test_a_report_shows_itself(name: str) -> None:
    document = saved(name)
    assert len(repr(document)) < 300
    assert repr(document).startswith(f"<{type(document).__name__} ")
    assert str(document) == as_file(document, "text")
    card = document._repr_html_()
    assert card.startswith("<div>")
    assert len(card) < 6000


def test_names_in_a_card_are_escaped(model: nn.Module) -> None:
    layers = nn.Module()
    layers.add_module("<script>alert(1)</script>", nn.Linear(8, 8))
    inner = next(layers.children())
    with torch.no_grad():
        inner.weight.fill_(5000.0)  # type: ignore[union-attr,operator]
    layers.forward = inner.forward  # type: ignore[method-assign]
    report = ampaudit.scan(layers, torch.full((4, 8), 10.0), policy="half")
    assert report.verdict == "fail"
    card = report._repr_html_()
    assert "<script>" not in card
    assert '<i class="FAIL">FAIL</i>' in card
