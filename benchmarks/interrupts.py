"""Sends signals to every command at random moments, and counts commands that do not end as they should.

python -m benchmarks.interrupts [--tries 300] [--seed 0] [--only COMMAND]
"""

from __future__ import annotations

import collections
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from benchmarks.options import parser
from tests.support.signals import end_by_signal

MODEL = """
import torch
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        return x + self.down(torch.nn.functional.gelu(self.up(self.norm(x))))

def get_model():
    torch.manual_seed(0)
    return nn.Sequential(*(Block() for _ in range(12)), nn.Linear(64, 10)).eval()

def example_inputs():
    return torch.randn(4, 64)

def batches():
    for _ in range(8):
        yield torch.randn(4, 64), torch.randint(0, 10, (4,))

def model_inputs(batch):
    return batch[0]

def loss(output, batch):
    return torch.nn.functional.cross_entropy(output, batch[1])
"""
SCRIPT = Path(__file__).parents[1] / "examples" / "lint"
COMMANDS = {
    "scan": "scan model.py -o scan.html",
    "scan --backward": "scan model.py --backward -o scan.json",
    "scan --stream": "scan model.py --weights half.safetensors --stream -q",
    "plan": "plan model.py",
    "convert": "convert model.py -o out",
    "convert weights": "convert big.safetensors -o out",
    "train": "train model.py --steps 20 -o training.json",
    "check": "check model.py other.py -j 2 -o check.xml",
    "verify": "verify done",
    "lint": "lint scripts -o lint.json",
    "lint --fix": "lint copied --fix",
    "report": "report done/report.json -o report.html",
    "diff": "diff old.json done/report.json -o diff.md",
    "bench": "bench model.py -o bench.json",
    "rules": "rules validate torch-cuda",
    "rules --model": "rules diff torch-cuda half --model model.py",
    "explain": "explain AMP106",
    "devices": "devices",
}


def prepare(place: Path, count: int) -> None:
    """Write the inputs of all commands, with ``count`` large weights and ``count`` copies of each script."""
    import torch
    from safetensors.torch import save_file

    (place / "model.py").write_text(MODEL)
    (place / "other.py").write_text(MODEL)
    save_file({f"w{i}.weight": torch.ones(1024, 1024) for i in range(count)}, place / "big.safetensors")
    space: dict[str, object] = {}
    exec(MODEL, space)
    state = space["get_model"]().half().state_dict()  # type: ignore[operator]
    save_file(state, place / "half.safetensors")
    (place / "scripts").mkdir()
    for number in range(count):
        for path in SCRIPT.glob("*.py"):
            (place / "scripts" / f"{path.stem}_{number}.py").write_text(path.read_text())
    for words in ("convert model.py -o done", "scan model.py --policy half --fail-on never -o old.json"):
        done = subprocess.run(
            [sys.executable, "-m", "ampaudit", *words.split()], cwd=place, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__)
    words.add_argument("--tries", type=int, default=300, help="number of signals")
    words.add_argument("--seed", type=int, default=0)
    words.add_argument("--only", default="", help="commands whose name contains this text")
    options = words.parse_args(arguments)
    if options.smoke:
        options.tries, options.only = 1, "explain"
    chance = random.Random(options.seed)
    wrong = 0
    outcomes: collections.Counter[str] = collections.Counter()
    with tempfile.TemporaryDirectory() as folder:
        place, temporary = Path(folder) / "place", Path(folder) / "tmp"
        place.mkdir()
        prepare(place, 1 if options.smoke else 40)
        names = [name for name in COMMANDS if options.only in name]
        durations: dict[str, float] = {}
        for number in range(options.tries):
            name = names[number % len(names)]
            clean(place, temporary)
            if name not in durations:
                start = time.monotonic()
                end_by_signal(COMMANDS[name].split(), place, temporary, signal.SIGINT, 300)
                durations[name] = time.monotonic() - start
                clean(place, temporary)
            kind = chance.choice((signal.SIGINT, signal.SIGINT, signal.SIGTERM, signal.SIGHUP))
            again = chance.choice((None, None, chance.random() * 0.1))
            after = chance.random() * durations[name]
            ended = end_by_signal(COMMANDS[name].split(), place, temporary, kind, after, again)
            outcomes["ended before the signal" if ended.sent is None else f"exit code {ended.code}"] += 1
            if faults := ended.faults():
                wrong += 1
                when = f"after {after:.3f} of {durations[name]:.1f} s, again {again}"
                print(f"{name}, {kind.name} {when}: {faults}", flush=True)
    print(f"{wrong} of {options.tries} ended wrongly; {dict(outcomes)}")


def clean(place: Path, temporary: Path) -> None:
    """Remove the outputs of the last run."""
    outputs = "scan.html scan.json training.json check.xml lint.json report.html diff.md bench.json"
    for name in outputs.split():
        (place / name).unlink(missing_ok=True)
    for directory in (place / "out", place / "copied", temporary):
        shutil.rmtree(directory, ignore_errors=True)
    shutil.copytree(place / "scripts", place / "copied")


if __name__ == "__main__":
    main()
