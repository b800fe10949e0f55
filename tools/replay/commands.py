"""Commands: every policy, every mode of ``scan``, plans, conversions, training, rules, lint."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from itertools import pairwise
from pathlib import Path

from ampaudit.findings.pages import all_pages
from tests.linter.corpora import SETS, read_set
from tests.linter.examples import BAD, GOOD
from tests.support.cures.table import CASES as CURES
from tests.support.parallel import MODEL as MIXED
from tests.support.paths import ROOT
from tests.support.rule_file import GOOD as RULES
from tests.targets.cases import CASES as TARGETS
from tests.targets.cases import Case as Target
from tools.replay.case import Run, family, session

POLICIES = sorted(path.stem for path in (ROOT / "rules").glob("*.yaml"))
EXAMPLES = ("t5_feed_forward", "mean_pooling")
RECURRENT = """
import torch
from torch import nn

class Cell(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, state):
        return state + torch.tanh(self.inner(state)) * 0.1 + 300.1 - 300.0

def get_model():
    torch.manual_seed(0)
    return Cell().eval()

def example_inputs(length=4):
    return torch.ones(length, 8)

def loss(output):
    return output.square().mean()
"""
MODELS = {
    "t5": "examples/t5_feed_forward.py",
    "attention": "examples/attention_scores.py",
    "digits": "examples/training/digits.py",
    "mixed": "{}/mixed.py --batches 3",
    "recurrent": "{}/recurrent.py",
}
LOSS, LARGE = "digits mixed recurrent", "t5 attention mixed"
# by name: options, in which MODEL is the model, and the models
MODES = {
    "plain": ("", " ".join(MODELS)),
    "half": ("--policy half", " ".join(MODELS)),
    "bfloat16": ("--dtype bfloat16", " ".join(MODELS)),
    "train": ("--train", LOSS),
    "several-policies": ("--policy torch-cuda,half,ampaudit", " ".join(MODELS)),
    "backward": ("--backward", f"t5 {LOSS}"),
    "loss-scale": ("--backward --loss-scale 1e7 --policy half", LOSS),
    "sensitivity": ("--sensitivity", " ".join(MODELS)),
    "gradient-sensitivity": ("--sensitivity --backward", LOSS),
    "prove": ("--prove", " ".join(MODELS)),
    "assume": ("--prove --assume input=-1:1", LOSS),
    "static": ("--static", " ".join(MODELS)),
    "steps": ("--steps 3", "t5 recurrent"),
    "sweep": ("--sweep length=2,16", "t5 recurrent"),
    "stress": ("--stress 200 --policy half", LARGE),
    "contract": ("--contract lower-accumulate,flush-to-zero", LARGE),
    "saturate": ("--contract saturate,decomposed --policy half", LARGE),
    "ranges": ("--ranges", " ".join(MODELS)),
    "against": ("--against MODEL --policy half", "t5 attention recurrent"),
    "advise": ("--advise --policy half", LARGE),
    "diff": ("--diff --policy torch-cuda", "t5 attention"),
    "advise-policy": ("--policy half --advise-policy {}/advised.yaml", "t5 mixed"),
    "memory": ("--memory 1500kB --policy half", LARGE),
    "resume": ("--resume {}/kept", LARGE),
    "ignore": ("--policy half --ignore AMP1 --fail-on warning --min-headroom 4 --min-sqnr 60", LARGE),
    "seed": ("--seed 7 --fail-on gap", LARGE),
    "device": ("--device cuda:9", "t5"),
}


@family
def policies() -> Iterator[tuple[str, Run]]:
    for policy in POLICIES:
        for example in EXAMPLES:
            words = f"examples/{example}.py --policy {policy} --format json"
            yield f"{policy}-{example}", session(f"scan {words}")
        yield (
            f"{policy}-bfloat16",
            session(f"scan {MODELS['t5']} --policy {policy} --dtype bfloat16 --format json"),
        )
        yield f"{policy}-plan", session(f"plan {MODELS['attention']} --policy {policy} --format json")


@family
def modes() -> Iterator[tuple[str, Run]]:
    for mode, (options, names) in MODES.items():
        for name in names.split():
            model = MODELS[name]
            words = f"scan {model} --format json {options.replace('MODEL', model.split()[0])}"
            yield f"{mode}-{name}", session(words, prepare=_models)


@family
def merged() -> Iterator[tuple[str, Run]]:
    for policy in ("ampaudit", "half"):
        parts = [
            f"scan mixed.py --batches 4 --policy {policy} --part {number}/2 -o {number}.json"
            for number in (1, 2)
        ]
        yield policy, session(*parts, "merge 2.json 1.json --format json", prepare=_models, inside=True)


@family
def inputs() -> Iterator[tuple[str, Run]]:
    """Recorded calls, weights and inputs from files."""
    yield "weights", session("scan {}/recurrent.py --weights {}/weights.pt --format json", prepare=_weights)
    yield (
        "streamed",
        session(
            "scan {}/recurrent.py --weights {}/weights.safetensors --stream --format json", prepare=_weights
        ),
    )
    yield "other-file", session("scan {}/recurrent.py --inputs {}/more.py --format json", prepare=_weights)
    for name, factory, words in (
        ("generate", "tiny_gpt2", "--tokens 3"),
        ("diffusion", "tiny_unet", "--steps 2"),
    ):
        script = f"examples/recording/{name}.py"
        module = "model" if name == "generate" else "pipe.unet"
        yield (
            f"recorded-{name}",
            session(
                f"record -m {module} -o {{}}/calls {script} {words}",
                f"scan {script}:{factory} --inputs {{}}/calls --format json",
            ),
        )


@family
def targets() -> Iterator[tuple[str, Run]]:
    """Each kind of target."""
    for target in TARGETS:
        yield target.name, partial(_target, target)


@family
def advice() -> Iterator[tuple[str, Run]]:
    for name, cure in list(CURES.items())[::3]:
        words = f"scan {{}}/model.py --batches {cure.count} --policy {cure.policy} --diff --format json"
        yield name, session(words, prepare=partial(_written, "model.py", cure.source))


@family
def conversions() -> Iterator[tuple[str, Run]]:
    """Converted directories, verified and restored."""
    options = {
        "plain": "",
        "bfloat16": "--dtype bfloat16",
        "train": "--mode train",
        "no-masters": "--no-masters --no-program",
        "half": "--policy half --fail-on never",
        "tuned": "--tune 50",
        "rescaled": "--policy half --rescale",
    }
    for example in ("t5_feed_forward", "attention_scores"):
        for name, more in options.items():
            yield (
                f"{example}-{name}",
                session(
                    f"convert examples/{example}.py -o {{}}/out --format json {more}",
                    "verify {}/out --format json",
                    "scan {}/out --format json",
                    "convert {}/out --to float32 -o {}/back",
                ),
            )
    yield (
        "dynamic",
        session(
            "convert {}/recurrent.py --dynamic state=rows:2-64,_ -o {}/out --format json",
            "verify {}/out --format json",
            prepare=_models,
        ),
    )
    yield (
        "onnx",
        session(
            "convert {}/recurrent.py --onnx -o {}/out --format json",
            "verify {}/out --format json",
            prepare=_models,
        ),
    )
    yield (
        "weights",
        session(
            "convert {}/weights.safetensors -o {}/out --format json",
            "verify {}/out --format json",
            prepare=_weights,
        ),
    )


@family
def tuning() -> Iterator[tuple[str, Run]]:
    options = {
        "plain": "",
        "auto": "--dtype auto --min-sqnr 30",
        "bytes": "--cost bytes --min-sqnr 60",
        "time": "--cost time --for v100",
        "exhaustive": "--exhaustive --min-sqnr 55",
    }
    for name, more in options.items():
        for model in ("t5", "recurrent"):
            words = f"tune {MODELS[model]} --format json --policy-file {{}}/policy.yaml {more}"
            yield f"{name}-{model}", session(words, prepare=_models)
    yield "metric", session(f"tune {MODELS['digits']} --metric-drop 0.01 --format json")


@family
def runs() -> Iterator[tuple[str, Run]]:
    """Training, measured modes, and budgets."""
    for policy in ("ampaudit", "apex-o3", "torch-cuda,half"):
        yield (
            f"train-{policy}",
            session(f"train examples/training/digits.py --steps 12 --policy {policy} --format json"),
        )
    yield (
        "train-text",
        session("train examples/training/text.py --steps 6 --loss-scale deepspeed --every 2 --format json"),
    )
    yield (
        "bench",
        session(
            "bench examples/t5_feed_forward.py --modes fp32,bf16,half --repeats 1 --for v100 --format json"
        ),
    )
    yield "check", session("check examples/t5_feed_forward.py missing.py --policy torch-cuda --format json")
    yield "check-budgets", session("check --config examples/ci/pyproject.toml --format json")
    yield (
        "check-baseline",
        session(
            "scan {}/recurrent.py --format json -o {}/old.json",
            "check {}/recurrent.py --baseline {}/old.json --policy half --min-sqnr 90 --format json",
            prepare=_models,
        ),
    )


@family
def rules() -> Iterator[tuple[str, Run]]:
    for policy in POLICIES:
        yield (
            f"show-{policy}",
            session(
                f"rules show {policy}",
                f"rules show {policy} --format json",
                f"rules validate rules/{policy}.yaml",
            ),
        )
    for first, second in pairwise(POLICIES):
        yield f"diff-{first}-{second}", session(f"rules diff {first} {second} --format json")
    for second in ("half", "apex-o1", "torch-cuda"):
        words = f"rules diff ampaudit {second} --model {MODELS['t5']}"
        yield f"model-{second}", session(f"{words} --format json", f"{words} -v")
    yield "list", session("rules list", "rules list --format json", "rules schema")
    yield (
        "file",
        session(
            "rules validate {}/rules.yaml",
            "rules show {}/rules.yaml --format json",
            "plan examples/t5_feed_forward.py --policy {}/rules.yaml --format json",
            prepare=partial(_written, "rules.yaml", RULES),
        ),
    )


@family
def lint() -> Iterator[tuple[str, Run]]:
    for name in SETS:
        yield name, session("lint {} -v --format json", prepare=partial(_corpus, name))
        if name.startswith("mistakes"):
            yield f"{name}-fixed", session("lint {} --diff --unsafe-fixes", prepare=partial(_corpus, name))
    for name, examples in (("bad", BAD), ("good", GOOD)):
        write = partial(_scripts, examples)
        yield name, session("lint {} -v --format json", prepare=write)
        yield f"{name}-fixed", session("lint {} --diff", "lint {} --diff --unsafe-fixes", prepare=write)
    yield (
        "examples",
        session("lint examples --no-gitignore", "lint examples --select AMP80,AMP86 --format json"),
    )


@family
def pages() -> Iterator[tuple[str, Run]]:
    yield "codes", session("explain", *(f"explain {code}" for code in all_pages()))
    yield "devices", session("devices", "devices --format json", "devices v100", "devices h100 --format json")
    yield "version", session("--help", "explain AMP000", "scan", "scan missing.py", "rules show missing")


def _written(name: str, text: str, folder: Path) -> None:
    (folder / name).write_text(text, encoding="utf-8")


def _models(folder: Path) -> None:
    _written("mixed.py", MIXED, folder)
    _written("recurrent.py", RECURRENT, folder)


def _weights(folder: Path) -> None:
    import safetensors.torch
    import torch

    _models(folder)
    _written(
        "more.py",
        "import torch\n\ndef batches():\n    yield torch.zeros(2, 8)\n    yield torch.ones(3, 8)\n",
        folder,
    )
    weights = {"inner.weight": torch.eye(8) * 3, "inner.bias": torch.arange(8.0)}
    torch.save(weights, folder / "weights.pt")
    safetensors.torch.save_file(weights, folder / "weights.safetensors")


def _target(target: Target, folder: Path) -> str:
    location = target.location(folder)
    return session(f"scan {location} {' '.join(target.options)} --format json")(folder)


def _scripts(examples: dict[str, str], folder: Path) -> None:
    for name, text in examples.items():
        _written(f"{name.replace(' ', '_')}.py", text, folder)


def _corpus(name: str, folder: Path) -> None:
    _scripts({script.name: script.source for script in read_set(name)}, folder)
