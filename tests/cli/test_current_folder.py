"""No command imports a file of the current folder, or of the folder that it reads."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import nn

from ampaudit.ci.check import check
from tests.support.converted import converted, tied
from tests.support.paths import ROOT
from tests.support.zoo import ZOO

# what is installed, and what transformers and torch would use if it were
PACKAGES = (
    "torch numpy click rich pydantic yaml psutil safetensors transformers re2 jinja2 libcst onnx onnxruntime "
    "matplotlib packaging sympy tqdm regex requests huggingface_hub tokenizers mpmath networkx filelock "
    "fsspec peft timm accelerate kernels orjson triton optimum bitsandbytes flash_attn torch_xla tensorflow "
    "jax torchvision torchaudio deepspeed sitecustomize usercustomize brotli chardet simplejson ujson cupy"
).split()
REPORT = ROOT / "tests" / "data" / "reports" / "overflow.json"


def fill(folder: Path, ran: Path, names: set[str]) -> None:
    """Fill a folder with files that say so when they are imported."""
    for name in names:
        (folder / f"{name}.py").write_text(f"open({str(ran / name)!r}, 'w').close()\n")


@pytest.fixture(scope="module")
def places(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """A hostile current folder, and hostile inputs of each kind that run no user code."""
    folder = tmp_path_factory.mktemp("places")
    here = {name: folder / name for name in ("cwd", "ran", "hf", "converted", "file")}
    for name in ("cwd", "ran", "file"):
        here[name].mkdir()
    ZOO["bert"]().model.save_pretrained(here["hf"])
    converted(tied(), here["converted"], policy="half")
    program = torch.export.export(nn.Linear(4, 4), (torch.randn(2, 4),))
    torch.export.save(program, here["file"] / "model.pt2")
    (here["cwd"] / "script.txt").write_text("import json\n")
    for name in ("cwd", "hf", "file"):
        fill(here[name], here["ran"], {*sys.stdlib_module_names, *PACKAGES} - {"__main__"})
    return here


@pytest.fixture(autouse=True)
def nothing_ran(places: dict[str, Path]) -> Iterator[None]:
    yield
    found = sorted(places["ran"].iterdir())
    for path in found:
        path.unlink()
    assert not found


COMMANDS: dict[str, Callable[[dict[str, Path]], list[str | Path]]] = {
    "rules": lambda _: ["rules", "list"],
    "explain": lambda _: ["explain", "AMP101"],
    "devices": lambda _: ["devices"],
    "report": lambda _: ["report", REPORT, "--format", "html"],
    "diff": lambda _: ["diff", REPORT, REPORT],
    "lint": lambda at: ["lint", at["cwd"] / "json.py"],
    "verify": lambda at: ["verify", at["converted"]],
    "scan-hf": lambda at: ["scan", at["hf"]],
    "scan-pt2": lambda at: ["scan", at["file"] / "model.pt2"],
    "scan-converted": lambda at: ["scan", at["converted"]],
    "check-hf": lambda at: ["check", at["hf"]],
}


@pytest.mark.parametrize("command", list(COMMANDS))
def test_no_command_imports_what_it_finds(command: str, places: dict[str, Path]) -> None:
    # -P stands for the installed program, whose own folder Python would put first instead
    words = [sys.executable, "-P", "-m", "ampaudit", *map(str, COMMANDS[command](places))]
    done = subprocess.run(
        words, cwd=places["cwd"], env=environment(), capture_output=True, text=True, timeout=200
    )
    assert done.returncode in (0, 1), done.stderr


def test_an_empty_entry_of_pythonpath_is_not_handed_on(
    places: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(places["cwd"])
    monkeypatch.setenv("PYTHONPATH", f"{os.pathsep}{ROOT}{os.pathsep}")
    (result,) = check(places["hf"]).targets
    assert result.exit_code == 0, result.error


def test_as_a_module_it_drops_the_current_folder_at_once(places: dict[str, Path], tmp_path: Path) -> None:
    asked = "import sys, ampaudit; print(*sys.modules)"
    command = [sys.executable, "-P", "-c", f"import runpy; {asked}"]
    loaded = subprocess.run(command, env=environment(), capture_output=True, text=True, check=True).stdout
    by_python = {name.partition(".")[0] for name in loaded.split()}
    assert "json" not in by_python
    # it also looks for modules that other systems have, such as nt
    names = {name for name in sys.stdlib_module_names if name not in by_python and find_spec(name)}
    fill(tmp_path, places["ran"], {*names, *PACKAGES})
    words = [sys.executable, "-m", "ampaudit", "scan", str(places["file"] / "model.pt2")]
    done = subprocess.run(words, cwd=tmp_path, env=environment(), capture_output=True, text=True, timeout=200)
    assert done.returncode in (0, 1), done.stderr


def test_functions_of_a_model_file_still_import_their_neighbors(
    model_file: Callable[[str], Path], cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    (tmp_path / "parts.py").write_text("from torch import nn\ndef made(): return nn.Linear(4, 4)\n")
    body = (
        "def get_model():\n    import parts\n    return parts.made()\n"
        "def example_inputs(): return torch.randn(2, 4)\n"
    )
    path = model_file(body)
    done = cli("check", path, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    done = cli("scan", "model:get_model", cwd=tmp_path)
    assert done.returncode == 0, done.stderr


def test_a_module_file_does_not_take_the_place_of_an_installed_module_later(
    model_file: Callable[[str], Path], cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path
) -> None:
    fill(tmp_path, tmp_path, {"onnx", "statistics", "cProfile"})
    path = model_file(
        "def get_model():\n    import statistics\n    assert statistics.mean([1, 3]) == 2\n"
        "    return nn.Linear(4, 4)\ndef example_inputs(): return torch.randn(2, 4)\n"
    )
    assert cli("scan", path, cwd=tmp_path).returncode == 0
    assert not (tmp_path / "statistics").exists()


def environment() -> dict[str, str]:
    """This process's environment, in which ampaudit is found as a user's installation is."""
    return {**os.environ, "PYTHONPATH": str(ROOT)}
