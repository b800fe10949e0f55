"""The rule files are found from a wheel, from an editable install and from a checkout."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from urllib.parse import urlsplit
from urllib.request import url2pathname

import pytest

from tests.support.paths import ROOT

SHIPPED = " ".join(sorted(path.stem for path in (ROOT / "rules").glob("*.yaml")))
ASK = (
    "import ampaudit.policy as load; from ampaudit.policy.load import rules_directory; "
    "print(rules_directory()); "
    "print(load.load_policy('torch-cuda').name, *load.policy_names())"
)


def answer(*path: Path, cwd: Path, isolated: bool = False) -> tuple[Path, str]:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(map(str, path))}
    done = subprocess.run(
        [sys.executable, *(["-P"] if not isolated else []), "-c", ASK],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    directory, names = done.stdout.splitlines()
    return Path(directory), names


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(target)],
        cwd=ROOT,
        check=True,
        capture_output=True,
    )
    return next(target.glob("*.whl"))


def test_from_a_wheel(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        assert "ampaudit/findings/pages/AMP101.md" in archive.namelist()
        archive.extractall(tmp_path / "site")
        names = archive.namelist()
    assert "ampaudit/py.typed" in names
    assert not any(name.startswith(("tests/", "rules/")) for name in names)
    directory, policies = answer(tmp_path / "site", cwd=tmp_path)
    assert directory == tmp_path / "site" / "ampaudit" / "_rules"
    assert policies == f"torch-cuda {SHIPPED}"


def test_from_an_editable_install(tmp_path: Path) -> None:
    import importlib.metadata

    installed = json.loads(importlib.metadata.distribution("ampaudit").read_text("direct_url.json") or "{}")
    if not installed.get("dir_info", {}).get("editable"):
        pytest.skip("ampaudit is not installed in editable mode here")
    checkout = Path(
        url2pathname(urlsplit(installed["url"]).path)
    )  # not this one, in another work tree of git
    directory, policies = answer(cwd=tmp_path)
    assert directory == checkout / "rules"
    assert policies == " ".join(["torch-cuda", *sorted(path.stem for path in directory.glob("*.yaml"))])


def test_from_a_checkout(tmp_path: Path) -> None:
    copy = tmp_path / "checkout"
    for part in ("ampaudit", "rules"):
        subprocess.run(["cp", "-r", str(ROOT / part), str(copy / part)], check=False)
        if not (copy / part).exists():
            copy.mkdir()
            subprocess.run(["cp", "-r", str(ROOT / part), str(copy / part)], check=True)
    directory, policies = answer(copy, cwd=tmp_path)
    assert directory == copy / "rules"
    assert policies == f"torch-cuda {SHIPPED}"
