"""``ampaudit rules`` and ``ampaudit plan``, and the worked example of docs/rules.md."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml
from click.testing import CliRunner, Result

from ampaudit.cli.program import main
from ampaudit.core.errors import AuditError
from ampaudit.core.sites import pattern_of
from ampaudit.policy import OpFacts, load_file, load_policy, policy_names
from ampaudit.policy.schema import rules_schema_text
from tests.support.paths import ROOT

EXAMPLES = ROOT / "examples"
MODEL = """
import torch
from torch import nn

class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(16, 64)
        self.second = nn.Linear(64, 16)
        self.norm = nn.LayerNorm(16)
    def forward(self, x):
        return self.norm(x + self.second(nn.functional.gelu(self.first(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.classifier = nn.Linear(16, 4)
    def forward(self, x):
        for layer in self.layers:
            x = layer(x)
        return torch.softmax(self.classifier(x), -1)

def get_model():
    return Model()

def example_inputs():
    torch.manual_seed(0)
    return torch.randn(5, 16)
"""


def run(*args: str) -> Result:
    return CliRunner(env={"COLUMNS": "160"}).invoke(main, list(args))


@pytest.fixture
def model(tmp_path: Path) -> str:
    path = tmp_path / "model.py"
    path.write_text(MODEL)
    return str(path)


def examples_of(text: str) -> list[str]:
    return re.findall(r"```yaml\n(.*?)```", text, re.S)


@pytest.fixture
def accelerator(tmp_path: Path) -> str:
    """The first example of the documentation, as a file."""
    path = tmp_path / "my-accelerator.yaml"
    path.write_text(examples_of((ROOT / "docs" / "rules.md").read_text())[0])
    return str(path)


def test_the_worked_example_is_valid_and_does_what_it_says(accelerator: str, model: str) -> None:
    checked = run("rules", "validate", accelerator)
    assert checked.exit_code == 0, checked.output
    assert "5 rules" in checked.stdout
    assert checked.stderr == ""
    plan = json.loads(run("plan", model, "--policy", accelerator, "--format", "json").stdout)
    precision = {site["site"]: (site["precision"], site["rule"]) for site in plan["sites"]}
    assert precision["layers.0.first/linear"] == ("float16", "matrix-unit")
    assert precision["layers.2/gelu"] == ("float32", "no-erf")
    assert precision["layers.1.norm/layer_norm"] == ("float32", "norms-and-softmax")
    assert precision["classifier/linear"] == ("float32", "last-layer")
    assert precision["(top)/softmax"] == ("float32", "norms-and-softmax")
    deep = load_policy(accelerator).decide(OpFacts("linear", "mlp", "float16", depth=8192))
    assert deep.rule == "deep-products"


def test_the_other_examples_of_the_documentation_are_valid(tmp_path: Path) -> None:
    examples = examples_of((ROOT / "docs" / "rules.md").read_text())
    assert len(examples) == 2
    for number, text in enumerate(examples):
        path = tmp_path / f"{number}.yaml"
        path.write_text(text)
        assert not load_file(str(path)).warnings


def test_the_schema_is_documented_and_accepts_every_shipped_policy() -> None:
    assert (ROOT / "docs" / "rules.schema.json").read_text() == rules_schema_text(), "run: make schema"
    schema = json.loads(run("rules", "schema").stdout)
    for name in policy_names():
        jsonschema.validate(yaml.safe_load((ROOT / "rules" / f"{name}.yaml").read_text()), schema)
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate({"name": "x", "title": "y", "ruls": []}, schema)


def test_list_and_show_every_policy() -> None:
    listed = run("rules", "list")
    for name in policy_names():
        assert name in listed.stdout
        shown = run("rules", "show", name)
        assert shown.exit_code == 0
        for rule in load_file(name).file.rules:
            assert rule.id in shown.stdout
    assert json.loads(run("rules", "list", "--format", "json").stdout)[0]["name"] == policy_names()[0]
    assert json.loads(run("rules", "show", "onnx", "--format", "json").stdout)["vocabulary"] == "onnx"


def test_rules_commands_do_not_import_torch() -> None:
    code = (
        "import sys\nfrom click.testing import CliRunner\nfrom ampaudit.cli.program import main\n"
        "for args in (['list'], ['show', 'ampaudit'], ['schema'], ['diff', 'torch-cuda', 'mxnet-fp16']):\n"
        "    assert CliRunner().invoke(main, ['rules', *args]).exit_code == 0\n"
        "print('torch' in sys.modules)\n"
    )
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_diff_of_two_policies() -> None:
    rows = json.loads(run("rules", "diff", "torch-cuda", "apex-o1", "--format", "json").stdout)
    found = {row["op"]: (row["first"], row["second"]) for row in rows}
    assert found["gelu"] == ("follow (default)", "float32 (precision)")
    assert found["scaled_dot_product_attention"] == ("lower (speed)", "follow (default)")
    assert "linear" not in found
    same = run("rules", "diff", "torch-cuda", "torch-cuda")
    assert "differ in 0 of the 119 ops" in same.stdout


def test_diff_on_a_model_names_the_layers_that_differ(model: str) -> None:
    text = " ".join(run("rules", "diff", "torch-cuda", "apex-o1", "--model", model).stdout.split())
    assert "run 3 of" in text
    assert "layers.*/gelu 3 float16 (default) float32 apex-o1/precision" in text
    assert "Casts" in text
    data = json.loads(run("rules", "diff", "half", "apex-o1", "--model", model, "--format", "json").stdout)
    assert set(data) == {"half", "apex-o1"}
    assert data["half"]["casts"] == 0
    assert data["apex-o1"]["cast_bytes"] > 0


def test_plan_reads_well(model: str) -> None:
    text = run("plan", model, "--policy", "torch-cuda").stdout
    flat = " ".join(text.split())
    assert "layers.*.first/linear 3 float16" in flat
    assert "torch-cuda/matmul" in flat
    assert "tensor cores multiply 16-bit operands" in flat
    assert "nothing was run in float16" in flat
    one = run("plan", model, "--policy", "torch-cuda", "--layer", "layers.1*", "-v").stdout
    assert "layers.1.first/linear" in one
    assert "layers.0" not in one
    assert "classifier" not in one


def test_plan_counts_casts_bytes_and_weights(model: str) -> None:
    """By hand: 7 linears, each with weight and bias cast; activations of 5 rows."""
    plan = json.loads(run("plan", model, "--policy", "torch-cuda", "--format", "json").stdout)
    linear = next(s for s in plan["sites"] if s["site"] == "layers.0.first/linear")
    weights, activation = 16 * 64 + 64, 5 * 16
    assert linear["casts"] == 3
    assert linear["cast_bytes"] == (weights + activation) * (4 + 2)
    second = next(s for s in plan["sites"] if s["site"] == "layers.0.second/linear")
    assert second["casts"] == 2  # its input is in 16 bits already
    linears = 3 * (16 * 64 + 64 + 64 * 16 + 16) + 16 * 4 + 4
    norms = 3 * 32
    assert plan["weights"]["before"] == 4 * (linears + norms)
    assert plan["weights"]["after"] == 2 * linears + 4 * norms
    assert plan["weights"]["masters"] == 4 * linears
    half = json.loads(run("plan", model, "--policy", "half", "--format", "json").stdout)
    assert (half["casts"], half["weights"]["after"]) == (0, 2 * (linears + norms))


def test_plan_from_python() -> None:
    import torch

    import ampaudit

    model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Softmax(-1)).eval()
    plan = ampaudit.plan(model, torch.randn(2, 4), policy="torch-cuda", dtype="bfloat16")
    assert [(s.site, s.precision) for s in plan.sites] == [("0/linear", "bfloat16"), ("1/softmax", "float32")]
    assert model[0].weight.dtype is torch.float32
    with pytest.raises(AuditError, match="not a 16-bit format"):
        ampaudit.plan(model, torch.randn(2, 4), dtype="float32")


def test_a_weight_that_one_use_takes_in_float32_is_not_counted_as_16_bit(tmp_path: Path) -> None:
    path = tmp_path / "tied.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class Tied(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n        self.embed = nn.Embedding(10, 8)\n"
        "    def forward(self, x):\n        h = self.embed(x)\n"
        "        return nn.functional.linear(h, self.embed.weight)\n"
        "def example_inputs():\n    return torch.tensor([[1, 2]])\n"
    )
    plan = json.loads(run("plan", str(path), "--policy", "torch-cuda", "--format", "json").stdout)
    assert plan["weights"] == {"before": 320, "after": 320, "masters": 0}


def test_a_weight_in_16_bits_that_the_code_takes_as_float32_is_stored_in_16_bits(tmp_path: Path) -> None:
    """As Mamba computes ``-exp(A_log.float())``."""
    import torch
    from safetensors.torch import load_file as load_tensors

    import ampaudit

    class Upcast(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.log = torch.nn.Parameter(torch.zeros(64))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * self.log.float().exp().to(x.dtype)

    model, x = Upcast().eval(), torch.randn(4, 64)
    weights = ampaudit.plan(model, x, policy="half").weights
    ampaudit.convert(model, x, tmp_path / "out", policy="half")
    stored = load_tensors(tmp_path / "out" / "model.safetensors")["log"]
    assert (weights.before, weights.after, weights.masters) == (64 * 4, stored.nbytes, 64 * 4)
    assert stored.dtype is torch.float16


def test_casts_whose_size_depends_on_values_are_counted_without_bytes() -> None:
    """As the tokens of an expert, or the boxes of a detector."""
    import torch

    import ampaudit

    class Chosen(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = torch.nn.Linear(8, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            chosen: torch.Tensor = self.inner(x[x[:, 0] > 0])
            return chosen

    plan = ampaudit.plan(Chosen().eval(), torch.randn(16, 8), policy="torch-cuda")
    assert (plan.casts, plan.cast_bytes) == (3, (8 * 4 + 4) * (4 + 2))  # of the weight and the bias
    assert "the bytes of 1 cast depend on the values of the inputs: not counted" in plan.notes


def test_plan_of_a_measured_policy_runs_fp32_once() -> None:
    location = str(EXAMPLES / "t5_feed_forward.py")
    plan = json.loads(run("plan", location, "--format", "json").stdout)
    raised = [
        s for s in plan["sites"] if s["rule"] == "ampaudit/overflow" and s["op"].startswith("aten.linear")
    ]
    assert {s["layer"] for s in raised} == {"blocks.1.wo", "blocks.2.wo"}
    assert all("measured: " in s["why"] for s in raised)
    assert plan["notes"]


def test_plan_is_written_to_a_file_and_mistakes_are_told(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))  # a plan without that layer is kept
    output = tmp_path / "plan.txt"
    written = run("plan", model, "--policy", "half", "-o", str(output))
    assert written.exit_code == 0
    assert "policy half" in " ".join(output.read_text().split())
    again = run("plan", model, "--policy", "half", "-o", str(output))
    assert isinstance(again.exception, AuditError)
    wrong = run("plan", model, "--policy", "half", "--layer", "layer.1")
    assert wrong.exit_code == 2
    assert "no layer matches 'layer.1'; there is 'layers.1'" in wrong.stderr
    for args in (["--policy", "torch-cud"], ["--dtype", "float32"], ["--dtype", "int8"]):
        assert isinstance(run("plan", model, *args).exception, AuditError)


def test_names_of_a_model_are_escaped(tmp_path: Path) -> None:
    path = tmp_path / "evil.py"
    path.write_text(
        "import torch\nfrom torch import nn\n"
        "class Evil(nn.Module):\n"
        "    def __init__(self):\n        super().__init__()\n"
        "        self.add_module('a\\x1b[31m[red]', nn.Linear(4, 4))\n"
        "    def forward(self, x):\n        return self._modules['a\\x1b[31m[red]'](x)\n"
        "def example_inputs():\n    return torch.ones(2, 4)\n"
    )
    for args in (["plan", str(path)], ["rules", "diff", "half", "apex-o0", "--model", str(path)]):
        result = run(*args)
        assert result.exit_code == 0, result.output
        assert "\x1b[31m" not in result.stdout
        assert "[red]" in result.stdout


def test_patterns_of_stacks() -> None:
    assert pattern_of("encoder.layer.11.attention/linear#2") == "encoder.layer.*.attention/linear#2"
    assert pattern_of("features.0/conv2d") == "features.*/conv2d"
    assert pattern_of("conv2d_3.x/add") == "conv2d_3.x/add"
