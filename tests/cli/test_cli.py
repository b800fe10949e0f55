"""The program as a user meets it: exit codes, streams, files, and errors of one clear line."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from ampaudit.core.errors import OutputError
from ampaudit.core.files import write_text

Cli = Callable[..., subprocess.CompletedProcess[str]]
Write = Callable[..., Path]
HEALTHY = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 4)
    def forward(self, x):
        print('user code prints')
        return self.inner(x)
def example_inputs():
    return torch.randn(2, 8)
"""
BROKEN = HEALTHY.replace("return self.inner(x)", "return self.inner(x) * 1e6").replace(
    "randn(2, 8)", "ones(2, 8)"
)


def clean_error(done: subprocess.CompletedProcess[str], code: int, *parts: str) -> None:
    assert done.returncode == code, done.stderr
    assert done.stdout == ""
    assert "Traceback" not in done.stderr
    lines = [
        line for line in done.stderr.splitlines() if not line.startswith(("loading", "auditing", "user"))
    ]
    assert len(lines) <= 2, done.stderr
    assert lines[-1].startswith("  next: ") or code in (130, 2)
    for part in parts:
        assert part in done.stderr, done.stderr


def test_exit_codes_and_streams(cli: Cli, model_file: Write) -> None:
    good, bad = model_file(HEALTHY, "good.py"), model_file(BROKEN, "bad.py")
    done = cli("scan", good)
    assert done.returncode == 0
    assert "PASS" in done.stdout
    assert "user code prints" not in done.stdout
    done = cli("scan", bad, "--policy", "half")
    assert done.returncode == 1
    assert "FAIL  1 place breaks in float16" in done.stdout
    assert "\x1b" not in done.stdout
    assert cli("scan", bad, "--policy", "half", "--fail-on", "never", "-q").returncode == 0


def test_json_on_stdout_is_only_json_and_the_same_twice(cli: Cli, model_file: Write) -> None:
    path = model_file(BROKEN)
    first, second = (cli("scan", path, "--policy", "half", "--format", "json") for _ in range(2))
    documents = [json.loads(done.stdout) for done in (first, second)]
    for document in documents:
        document.pop("timings")
    assert json.dumps(documents[0]) == json.dumps(documents[1])
    assert documents[0]["findings"][0]["code"] == "AMP101"


def test_a_report_file_is_not_replaced_without_force(cli: Cli, model_file: Write, tmp_path: Path) -> None:
    out = tmp_path / "report.json"
    done = cli("scan", model_file(HEALTHY), "--format", "json", "-o", out)
    assert done.returncode == 0
    assert done.stdout == ""
    assert "PASS" in done.stderr
    assert json.loads(out.read_text())["verdict"] == "pass"
    clean_error(cli("scan", model_file(HEALTHY), "-o", out), 2, "exists", "--force")
    assert json.loads(out.read_text())["verdict"] == "pass"
    assert cli("scan", model_file(HEALTHY), "-o", out, "--force").returncode == 0
    assert json.loads(out.read_text())["verdict"] == "pass"  # the suffix says which format
    assert cli("scan", model_file(HEALTHY), "-o", out, "--force", "--format", "text").returncode == 0
    assert out.read_text().startswith("ampaudit")
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".report")] == []


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["none.py"], ["no such file: none.py"]),
        (["good.py", "--policy", "torch-cud"], ["unknown policy 'torch-cud'", "did you mean 'torch-cuda'?"]),
        (["good.py", "--policy", "bad.yaml"], ["bad.yaml:4:1: unknown key 'rulez'"]),
        (["good.py", "--dtype", "int8"], ["unknown dtype 'int8'"]),
        (["good.py", "--dtype", "float32"], ["not a 16-bit format"]),
        (["good.py", "--weights", "none.pt"], ["none.pt: No such file"]),
        (["good.py", "-o", "nowhere/report.txt"], ["no such directory"]),
        (["syntax.py"], ["syntax.py:3: syntax error"]),
        (["nomodel.py"], ["defines no get_model()", "get_model"]),
    ],
)
def test_bad_input_is_one_clear_line(
    cli: Cli, model_file: Write, tmp_path: Path, arguments: list[str], parts: list[str]
) -> None:
    model_file(HEALTHY, "good.py")
    model_file("def (:\n", "syntax.py")
    model_file("x = 1\n", "nomodel.py")
    (tmp_path / "bad.yaml").write_text("name: bad\ntitle: t\nautocast: true\nrulez: []\n")
    clean_error(cli("scan", *arguments, cwd=tmp_path), 2, *parts)


def test_what_cannot_be_audited_is_exit_code_three(cli: Cli, model_file: Write) -> None:
    branching = HEALTHY.replace("return self.inner(x)", "return x if x.sum() > 0 else -x")
    branch = cli("scan", model_file(branching, "b.py"), "--static")
    clean_error(branch, 3, "b.py:10: cannot be exported", "torch.where")
    nan = HEALTHY.replace("return self.inner(x)", "return self.inner(x) / 0.0")
    clean_error(cli("scan", model_file(nan, "n.py")), 3, "FP32 model itself", "n.py:10")
    clean_error(
        cli("scan", model_file(HEALTHY.replace("(2, 8)", "(2, 9)"), "s.py")),
        *(2, "s.py:10: the model itself fails", "(2x9 and 8x", "float32[2, 9]"),
    )


def test_a_mistyped_command_is_named(cli: Cli) -> None:
    done = cli("chekc")
    assert done.returncode == 2
    assert "Error: No such command 'chekc': did you mean 'check'?" in done.stderr
    assert cli("zzz").stderr.endswith("Error: No such command 'zzz'.\n")


def test_debug_shows_the_traceback(cli: Cli) -> None:
    assert "Traceback" in cli("scan", "none.py", "--debug").stderr


def test_cuda_without_a_device(cli: Cli, model_file: Write) -> None:
    done = cli("scan", model_file(HEALTHY), "--device", "cuda", CUDA_VISIBLE_DEVICES="")
    clean_error(done, 2, "cuda is not available here")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_behind_stdout(model_file: Write, tmp_path: Path) -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ampaudit", "scan", str(model_file(HEALTHY)), "--format", "json"],
            stdout=full,
            stderr=subprocess.PIPE,
            env={**os.environ, "TMPDIR": str(tmp_path)},
            text=True,
            check=False,
        )
    assert done.returncode == 2
    assert "No space left" in done.stderr
    (kept,) = tmp_path.glob("ampaudit-scan-*.json")
    assert f"the result is kept in {kept}" in done.stderr
    assert "Traceback" not in done.stderr


def test_what_other_processes_print_is_not_part_of_a_report(model_file: Write) -> None:
    noisy = HEALTHY.replace(
        "def example_inputs", "import os\nos.system('echo from a process')\ndef example_inputs"
    )
    words = [sys.executable, "-m", "ampaudit", "scan", str(model_file(noisy)), "--format", "json"]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert json.loads(done.stdout)["kind"] == "scan"
    assert "from a process" in done.stderr


def test_a_full_disk_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "report.json"
    out.write_text("old")

    def full(_: int) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OutputError, match="No space left on device"):
        write_text(out, "new", force=True)
    assert out.read_text() == "old"
    assert list(tmp_path.iterdir()) == [out]


def test_ctrl_c_ends_with_one_line_and_no_file(model_file: Write, tmp_path: Path) -> None:
    slow = HEALTHY.replace(
        "return torch.randn(2, 8)", "import time\n    print('asleep', flush=True)\n    time.sleep(60)"
    )
    path, out = model_file(slow), tmp_path / "report.json"
    process = subprocess.Popen(
        [sys.executable, "-m", "ampaudit", "scan", str(path), "-o", str(out)],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        # a test run in the background of a shell ignores SIGINT, and children inherit that
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    assert process.stderr is not None
    while "asleep" not in process.stderr.readline():
        pass
    process.send_signal(signal.SIGINT)
    stdout, stderr = process.communicate(timeout=60)
    assert process.returncode == 130
    assert "interrupted; nothing was written" in stderr
    assert "Traceback" not in stderr
    assert stdout == ""
    assert not out.exists()


def test_help_is_fast_and_does_not_import_torch() -> None:
    code = (
        "import sys\nsys.argv = ['ampaudit', '--help']\n"
        "from ampaudit.cli.main import run\n"
        "import atexit\n"
        "atexit.register(lambda: print('torch' in sys.modules, 'pydantic' in sys.modules))\n"
        "run()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[-1] == "False False"
    code = (
        "import sys\nfrom ampaudit.policy import load_policy\nload_policy('torch-cuda')\n"
        "print('torch' in sys.modules)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.mark.parametrize("option", ["--policy", "--dtype", "--device", "--batches", "--seed", "--weights"])
def test_help_of_scan_names_its_options(cli: Cli, option: str) -> None:
    assert option in cli("scan", "--help").stdout


def test_lists_in_the_help_are_lists(cli: Cli) -> None:
    assert "\n    file.py:factory          another function" in cli("scan", "--help").stdout
    assert "\n    weights.safetensors, model.safetensors.index.json" in cli("convert", "--help").stdout
