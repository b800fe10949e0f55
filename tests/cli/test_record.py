"""``ampaudit record`` runs a script as Python does, and finds its modules by the names that it gives them."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import ampaudit
from ampaudit.cli.program import run_command
from ampaudit.core.source_config import SourceConfig

Cli = Callable[..., subprocess.CompletedProcess[str]]
SCRIPT = """
import argparse, sys
import torch
from torch import nn
import helper

class Encoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(4, 4), nn.Linear(4, 4)])
    def forward(self, x, *, scale=1.0):
        for layer in self.layers:
            x = layer(x) * scale
        return x

class Pipe:
    def __init__(self):
        self.unet, self.vae, self.parts = Encoder(), nn.Linear(4, 2), [nn.Tanh()]
    def __call__(self, steps):
        x = torch.randn(1, 4)
        for step in range(steps):
            x = self.unet(self.parts[0](x), scale=float(step))
        return self.vae(x)

def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int)
    parser.add_argument("--fail", default="")
    given = parser.parse_args()
    torch.manual_seed(0)
    pipe = Pipe()
    print(__name__, sys.argv[1:], sys.path[0], helper.NAME, sys.modules["__main__"].Pipe is Pipe)
    with torch.no_grad():
        print(pipe(given.steps).tolist(), torch.rand(1).item())
    if given.fail == "raise":
        raise ValueError("broken \\x1b[31m")
    if given.fail:
        sys.exit(given.fail if given.fail == "text" else int(given.fail))

if __name__ == "__main__":
    main()
"""
GLOBAL = SCRIPT[: SCRIPT.index("def main")] + "pipe = Pipe()\nprint(pipe(3).shape)\n"


@pytest.fixture
def script(tmp_path: Path) -> Path:
    (tmp_path / "scripts").mkdir()
    (tmp_path / "scripts" / "helper.py").write_text("NAME = 'beside the script'\n")
    (tmp_path / "scripts" / "pipe.py").write_text(SCRIPT)
    (tmp_path / "scripts" / "flat.py").write_text(GLOBAL)
    return tmp_path / "scripts" / "pipe.py"


def test_a_script_runs_as_it_does_by_itself(script: Path, tmp_path: Path, cli: Cli) -> None:
    words = [str(script), "--steps", "3"]
    plain = subprocess.run(
        [sys.executable, *words], capture_output=True, text=True, check=True, cwd=tmp_path, timeout=120
    )
    done = cli("record", "-m", "pipe.unet", "-o", "calls", *words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout == plain.stdout
    assert done.stdout.startswith("__main__ ['--steps', '3']")
    assert done.stderr.startswith("ampaudit: 3 of 3 calls of pipe.unet recorded in calls (")
    assert done.stderr.count("\n") == 1
    call = json.loads((tmp_path / "calls" / "call-000003.json").read_text())
    assert call["kwargs"] == {"scale": 2.0}


@pytest.fixture
def program(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str]]:
    """Run the command in this process; return its exit code and what it tells."""

    def run(*words: object) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        for name in ("helper", "pipe"):
            monkeypatch.delitem(sys.modules, name, raising=False)
        monkeypatch.setattr(sys, "argv", ["ampaudit", "record", *map(str, words)])
        code = run_command()
        return code, capfd.readouterr().err

    return run


NAMES = {
    "pipe.unet": 3, "pipe.unet.layers.1": 3, "layers.0": 3, "Encoder": 3, "pipe.vae": 1, "pipe.parts.0": 3,
    "self.vae": 1, "Tanh": 3,
}  # fmt: skip


def test_the_names_of_modules(script: Path, tmp_path: Path, program: Callable[..., tuple[int, str]]) -> None:
    """Variables of functions, submodules of what is called, and classes, recorded together."""
    asked = [word for name in NAMES for word in ("-m", name)]
    code, told = program(*asked, "-o", "calls", script, "--steps", "3")
    assert code == 0, told
    found = {folder.name: len(list(folder.glob("call-*.json"))) for folder in (tmp_path / "calls").iterdir()}
    assert found == NAMES
    code, told = program("-m", "pipe.unet", "-o", "flat", script.with_name("flat.py"))
    assert code == 0, told
    assert "3 of 3 calls of pipe.unet" in told, "a variable of the script"
    code, told = program("-m", "pipe.unet", "-m", "pipe.unet", "-o", "twice", script.with_name("flat.py"))
    assert code == 0, told
    assert (tmp_path / "twice" / "call-000003.json").is_file(), "the same module"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["-m", "pipe.vat", "SCRIPT", "--steps", "1"], "no such module was called\n  next: the script calls"),
        (["-m", "Encodr", "SCRIPT", "--steps", "1"], "next: did you mean 'Encoder'? the script calls"),
        (
            ["-m", "pipe.unet", "SCRIPT", "--steps", "0"],
            "Encoder was never called, except for its methods\n  next: the script calls Linear (1 call)",
        ),
        (["-m", "layers.7", "SCRIPT", "--steps", "1"], "no such module"),
        (["-m", "pipe.unet", "missing.py"], "missing.py: no such file"),
        (["SCRIPT"], "Missing option '-m' / '--module'"),
        (["-m", "x", "--evry", "2", "SCRIPT"], "No such option"),
        (["-m", "x", "--every", "0", "SCRIPT"], "'--every'"),
        (["-m", "x", "--max-bytes", "much", "SCRIPT"], "not a valid size"),
        (["-m", "pipe.unet", "SCRIPT", "--steps", "1", "--fail", "raise"], "pipe.py:36: ValueError: broken"),
        (["-m", "pipe.unet", "SCRIPT", "--steps", "1", "--fail", "3"], "ended with exit code 3"),
        (["-m", "pipe.unet", "SCRIPT", "--steps", "1", "--fail", "text"], "ended with text"),
        (["-m", "pipe.unet", "--first", "1", "-o", "scripts", "SCRIPT"], "was not written by ampaudit"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_told_in_a_line(
    words: list[str], told: str, script: Path, program: Callable[..., tuple[int, str]]
) -> None:
    given = [str(script) if word == "SCRIPT" else word for word in words]
    output = [] if "-o" in given else ["-o", "calls"]
    code, found = program(*output, *given)
    assert code == 2, found
    assert told in found
    assert "Traceback" not in found
    assert "\x1b" not in found


def test_what_a_failing_script_did_is_recorded(
    script: Path, tmp_path: Path, program: Callable[..., tuple[int, str]]
) -> None:
    code, told = program("-m", "pipe.unet", "-o", "calls", script, "--steps", "2", "--fail", "raise")
    assert code == 2
    assert "2 of 2 calls" in told
    (script.parent / "model.py").write_text("from pipe import Encoder as get_model\n")
    report = ampaudit.scan(str(script.parent / "model.py"), source=SourceConfig(inputs=tmp_path / "calls"))
    assert (report.exit_code, report.run.batches) == (0, 2)


CAUGHT = """
import os, time, torch
model = torch.nn.Linear(2, 2)
model(torch.ones(1, 2))
try:
    os.write(1, b"ready\\n")  # Python drops an interrupt that comes while print() cleans up
    time.sleep(100)
except KeyboardInterrupt:
    time.sleep(1.5)
    model(torch.ones(1, 2))
    print("saved", flush=True)
"""


@pytest.mark.skipif(sys.platform == "win32", reason="Windows sends no SIGINT to a process")
def test_a_script_handles_an_interrupt_itself(tmp_path: Path) -> None:
    """As it does by itself: a training script that saves its work takes longer than a second."""
    (tmp_path / "script.py").write_text(CAUGHT)
    words = ["record", "-m", "model", "-o", str(tmp_path / "calls"), str(tmp_path / "script.py")]
    process = subprocess.Popen(
        [sys.executable, "-m", "ampaudit", *words],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"},
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),  # a job in the background ignores it
    )  # fmt: skip
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"
    time.sleep(1)
    process.send_signal(signal.SIGINT)
    out, told = process.communicate(timeout=60)
    assert process.returncode == 0, told
    assert out.endswith("saved\n")
    assert "2 of 2 calls of model" in told
