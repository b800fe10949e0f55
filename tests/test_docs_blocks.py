"""Every code block of the README and the docs runs: Python, command lines, rule files and settings."""

from __future__ import annotations

import functools
import importlib.util
import re
import shlex
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from click.testing import CliRunner, Result
from safetensors.torch import save_file
from torch import nn

import ampaudit
from ampaudit.ci.config import read_config
from ampaudit.cli.program import main
from ampaudit.linter.config import read_lint_config
from ampaudit.policy import load_policy
from tests.support.paths import ROOT
from tests.support.processors import tokenizer

FILES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]

# command lines that are not run here, by how they begin, and why
NOT_RUN = {
    "make demo": "installs from the network",
    "make test": "is this",
    "pip install": "installs from the network",
    "ampaudit bench examples/efficientnet_b0.py": "minutes of training steps; test_bench.py runs tiny ones",
    "ampaudit bench model.py --modes fp32,converted,converted+compile": "compiles C++ for a minute",
    "ampaudit scan examples/training/digits.py": "trains on a data set; test_gradients.py runs its like",
}
# shown outputs that are run, but not compared
NOT_COMPARED = {
    "ampaudit train": "the last digits of trained losses are the processor's",
    "ampaudit convert examples/sentence_encoder.py": "so are those of errors and the sizes of exported files",
    "ampaudit tune examples/sentence_encoder.py": "and so are those of accuracies",
    "ampaudit scan examples/attention_scores.py --sensitivity": "and those of shares",
}
# a block that shows what a command prints names the command in the prose above it; these name none
NO_COMMAND = {"0  errors": "the floors of the architecture, which test_architecture.py holds"}

# the same lines with less to do
SHORTER = {
    "--steps 200": "--steps 10",
    "--stress 50": "--stress 5",
    "ampaudit bench": "ampaudit bench --repeats 1",
}

MODEL = """
import torch
from torch import nn


class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Sequential(nn.Sequential(nn.Linear(8, 8), nn.GELU()), nn.LayerNorm(8))

    def forward(self, x):
        return self.layer(x)


class Small(nn.Module):
    def __init__(self):
        super().__init__()
        self.encoder, self.head = Encoder(), nn.Linear(8, 4)

    def forward(self, x):
        return self.head(self.encoder(x))


def build():
    torch.manual_seed(0)
    return Small()


get_model = build


def example_inputs(length=4):
    return torch.linspace(-1, 1, 8 * length).reshape(length, 8)


def loss(output):
    return output.float().square().mean()


def next_inputs(outputs, inputs):
    return torch.cat([outputs, outputs], -1)
"""

ONNX_LOSS = """

def loss(outputs):
    return outputs["y"].float().square().mean()
"""

BERT = """
import torch
from transformers import BertConfig, BertModel

SIZES = {"vocab_size": 300, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2}


def get_model():
    return BertModel(BertConfig(**SIZES, intermediate_size=16, max_position_embeddings=16)).eval()


def example_inputs():
    return {"input_ids": torch.arange(8).reshape(1, 8)}
"""


@dataclass(frozen=True)
class Block:
    """One fenced block: where it is, its language, and its lines."""

    file: Path
    line: int
    language: str
    text: str

    def __str__(self) -> str:
        """The page and the first words, which stay when the block moves, and so does the tier of its test."""
        words = " ".join(re.findall(r"[\w.-]+", self.text))
        return f"{self.file.name}: {words[:80].strip()}"

    @property
    def commands(self) -> list[str]:
        """The command lines in it, without their comments; in a block of output, those after a prompt."""
        lines = [re.split(r"\s# ", line)[0].strip() for line in self.text.splitlines()]
        prompts = [line[2:] for line in lines if line.startswith("$ ")]
        known = ("ampaudit ", "cat ", "pip ", "make ")
        return prompts or ([line for line in lines if line] if lines[0].startswith(known) else [])

    @property
    def shown(self) -> tuple[str, list[list[str]]]:
        """The command after the prompt, and the pieces of its output between lines of three dots."""
        prompt, *lines = self.text.splitlines()
        pieces: list[list[str]] = [[]]
        for line in lines:
            if line == "...":
                pieces.append([])
            else:
                pieces[-1].append(line)
        return prompt.removeprefix("$ "), pieces


def blocks() -> Iterator[Block]:
    for file in FILES:
        lines = iter(enumerate(file.read_text(encoding="utf-8").splitlines(), 1))
        for number, line in lines:
            if fence := re.fullmatch(r"\s*```(\w*).*", line):
                inside = takewhile(lambda pair: not pair[1].strip().startswith("```"), lines)
                yield Block(file, number, fence[1], "\n".join(text for _, text in inside))


BLOCKS = list(blocks())
SHELL = [block for block in BLOCKS if not block.language and block.commands]
SHOWN = [block for block in SHELL if block.text.startswith("$ ")]


def of(language: str) -> Any:
    return pytest.mark.parametrize("block", [b for b in BLOCKS if b.language == language], ids=str)


def invoke(*words: str, given: str | None = None) -> Result:
    return CliRunner().invoke(main, words, input=given, catch_exceptions=False)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with everything that the docs' command lines mention."""
    place = tmp_path_factory.mktemp("docs")
    (place / "package").mkdir()
    for name in ("model.py", "package/module.py"):
        (place / name).write_text(MODEL)
    (place / "package" / "__init__.py").write_text("")
    for name, target in (("net.py", "class_with_arguments.py"), ("words.py", "words.py")):
        (place / name).write_text((ROOT / "tests" / "targets" / "models" / target).read_text())
    (place / "bert.py").write_text(BERT)
    (place / "examples").symlink_to(ROOT / "examples")
    for folder in ("src", "notebooks"):
        (place / folder).mkdir()
    for name in ("train.py", "src/train.py"):
        (place / name).write_text((ROOT / "examples" / "lint" / "finetune.py").read_text())
    (place / "notebooks" / "one.ipynb").write_text(
        '{"cells": [], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}'
    )
    (place / "README.md").write_text("# Nothing\n")
    (place / "reviews.txt").write_text("One line.\nAnother one.\n")
    rules = next(b for b in BLOCKS if b.language == "yaml" and "name: my-accelerator" in b.text)
    (place / "my-accelerator.yaml").write_text(rules.text)
    model = next(b for b in BLOCKS if b.language == "python" and "class Classifier" in b.text)
    (place / "classifier.py").write_text(model.text + "\n")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        small: dict[str, Any] = {}
        exec(MODEL, small)
        program = torch.export.export(small["build"]().eval(), (small["example_inputs"](),))
        torch.export.save(program, "program.pt2")
        export_onnx(small["build"]().eval(), small["example_inputs"]())
        for name, *words in (
            ("report.json", "model.py"),
            ("before.json", "examples/t5_feed_forward.py", "--policy", "torch-cuda"),
            ("after.json", "examples/t5_feed_forward.py"),
        ):
            invoke("scan", *words, "--format", "json", "-o", name)
        invoke("convert", "model.py", "-o", "out")
    return place


def export_onnx(model: nn.Module, inputs: torch.Tensor) -> None:
    """Write model.onnx, and the files of inputs for it that the docs name."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of the exporter
        names = {"input_names": ["x"], "output_names": ["y"], "dynamic_axes": {"x": {0: "batch"}}}
        torch.onnx.export(model, (inputs,), "model.onnx", dynamo=False, **names)
    np.savez("data.npz", x=inputs.numpy())
    save_file({"x": inputs}, "data.safetensors")
    Path("inputs.py").write_text(MODEL + ONNX_LOSS)


def is_installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


def reason_not_to_run(command: str) -> str | None:
    return next((why for start, why in NOT_RUN.items() if command.startswith(start)), None)


NEEDS = {
    "transformers": ("hf-model", "bert.py", "sentence_encoder.py", "recording/generate.py"),
    "diffusers": ("recording/diffusion.py",),
}


def missing_package(command: str) -> str | None:
    """Return what is not installed of what a command needs."""
    needed = (package for package, names in NEEDS.items() if any(name in command for name in names))
    return next((package for package in needed if not is_installed(package)), None)


@functools.cache  # several pages show the same commands
def run(command: str, place: Path) -> str:
    """One line as a shell would run it; a report's findings are no failure. What it prints to stdout."""
    command = command.partition(" | patch")[0]
    if command.startswith("cat "):
        shown, _, command = command.partition(" | ")
        given = (place / shown.split()[1]).read_text()
    else:
        given = None
    for long, short in SHORTER.items():
        command = command.replace(long, short)
    words = shlex.split(command)[1:]
    for option in ("-o", "--advise-policy"):
        if option in words and (place / words[words.index(option) + 1]).exists():
            words.insert(words.index(option) + 2, "--force")
    found = invoke(*words, given=given)
    assert found.exit_code in (0, 1), f"{command}\n{found.output}"
    assert "Traceback" not in found.output
    return found.stdout


@pytest.mark.parametrize("block", [block for block in SHELL if block not in SHOWN], ids=str)
def test_command_lines(block: Block, prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(prepared)
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.syspath_prepend(str(prepared))
    directory = prepared / "path" / "to" / "hf-model"
    if "hf-model" in block.text and is_installed("transformers"):
        space: dict[str, Any] = {}
        exec(BERT, space)
        space["get_model"]().save_pretrained(directory)
        tokenizer().save_pretrained(directory)
    for command in block.commands:
        if reason_not_to_run(command) is None and missing_package(command) is None:
            run(command, prepared)
    missing = set(filter(None, map(missing_package, block.commands)))
    if missing and all(map(missing_package, block.commands)):
        pytest.skip(f"needs {', '.join(missing)}")


@pytest.mark.parametrize("block", SHOWN, ids=str)
def test_shown_output_is_what_the_command_prints(
    block: Block, prepared: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(prepared)
    monkeypatch.setenv("COLUMNS", "100")
    command, pieces = block.shown
    if reason_not_to_run(command) or missing_package(command) is not None:
        return
    printed = run(command, prepared).splitlines()
    if any(command.startswith(start) for start in NOT_COMPARED):
        return
    begin = 0
    for number, piece in enumerate(pieces):
        places = range(begin, len(printed) - len(piece) + 1)
        if number == 0:
            places = places[:1]
        if number == len(pieces) - 1 and piece:
            places = places[-1:]
        found = next((i for i in places if printed[i : i + len(piece)] == piece), None)
        assert found is not None, "\n".join([*piece, "is not in", *printed[begin:]])
        begin = found + len(piece)


@of("python")
def test_python(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("model.py").write_text(MODEL)
    torch.manual_seed(0)
    by_ids = "input_ids" in block.text
    model: nn.Module = OfIds() if by_ids else nn.Linear(8, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    weight = nn.Parameter(torch.ones(()))
    weight.grad = torch.ones(())
    data = [(torch.ones(2, 8), torch.tensor([0, 1]))] * 2
    space: dict[str, Any] = {
        "ampaudit": ampaudit,
        "F": F,
        "nn": nn,
        "model": model.eval() if by_ids else model,
        "build_encoder": OfIds,
        "ids": torch.arange(8).reshape(1, 8),
        "optimizer": optimizer,
        "scaler": ampaudit.scaler("torch", "cpu"),
        "data": data,
        "loss": torch.tensor(1.0),
    }
    if "report.findings[0]" in block.text:  # a report with nothing in it has no first finding
        nn.init.ones_(model.table.weight)  # type: ignore[union-attr,arg-type]
        nn.init.constant_(model.head.weight, 5000.0)  # type: ignore[union-attr,arg-type]
        with pytest.raises(AssertionError, match="headroom"):
            exec(block.text, space)
        assert "prepared" in space, "only the last line, assert_safe, may fail for this model"
        return
    exec(block.text, space)
    for name, value in list(space.items()):
        if name.startswith("test_"):
            value(ampaudit.assert_safe)


class OfIds(nn.Module):
    """Takes ``input_ids``, as the docs' models do."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(20, 8), nn.Linear(8, 8)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.table(input_ids))


@of("yaml")
def test_yaml(block: Block, tmp_path: Path) -> None:
    data = yaml.safe_load(block.text)
    if isinstance(data, dict) and "rules" in data:
        path = tmp_path / f"{data['name']}.yaml"
        path.write_text(block.text)
        assert load_policy(str(path)).name == data["name"]
        return
    repositories = data["repos"] if isinstance(data, dict) else data
    ours = {hook["id"] for hook in yaml.safe_load((ROOT / ".pre-commit-hooks.yaml").read_text())}
    for hook in (hook for repository in repositories for hook in repository["hooks"]):
        assert hook["id"] in ours or hook["entry"].startswith("ampaudit lint")


@of("toml")
def test_settings(block: Block, tmp_path: Path) -> None:
    path = tmp_path / "pyproject.toml"
    path.write_text(block.text)
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "one.py").write_text(MODEL)
    if "[tool.ampaudit.lint]" in block.text:
        assert read_lint_config(path)
    else:
        assert read_config(path)


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    assert {block.language for block in BLOCKS} == {"", "python", "yaml", "toml"}
    commands = [command for block in SHELL for command in block.commands]
    left_out = {start for c in commands for start in NOT_RUN if c.startswith(start)}
    assert left_out == set(NOT_RUN), "a line that is left out is in the docs"
    assert len([c for c in commands if reason_not_to_run(c) is None]) >= 40


@pytest.mark.parametrize("block", [b for b in BLOCKS if not b.language and not b.commands], ids=str)
def test_a_block_of_output_stands_below_its_command(block: Block) -> None:
    before = block.file.read_text(encoding="utf-8").splitlines()[: block.line - 1]
    near = " ".join(before[-12:])
    known = any(block.text.startswith(start) for start in NO_COMMAND)
    assert known or re.search(r"`[^`]*(ampaudit|--\w+|train|scan)[^`]*`|ampaudit ", near)
