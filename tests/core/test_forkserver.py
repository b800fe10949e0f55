"""Processes that are forked from a server: what they are, how they end, and what ends them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from ampaudit.core import forkserver
from ampaudit.core.child import ChildProcess, child_environment
from tests.support.paths import ROOT

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux has the fork server")

MODULE = """
import decimal, json, os, sys, time

def describe():
    print(json.dumps({"argv": sys.argv[1:], "folder": os.getcwd(), "server": os.getppid(),
                      "leader": os.getsid(0) == os.getpid(), "environment": dict(os.environ),
                      "handles": len(os.listdir("/proc/self/fd"))}))

def leave(): sys.exit(3)
def fail(): raise ValueError("too bad")
def crash(): os.kill(os.getpid(), 11)
def wait(): time.sleep(600)
"""


@pytest.fixture
def start(tmp_path: Path) -> Callable[..., ChildProcess]:
    (tmp_path / "forked_module.py").write_text(MODULE)
    environment = {**child_environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    environment.pop("PYTEST_CURRENT_TEST", None)

    def call(
        name: str, *arguments: str, variables: dict[str, str] | None = None, **shared: str
    ) -> ChildProcess:
        return ChildProcess(
            f"forked_module:{name}",
            *arguments,
            log=tmp_path / "log",
            environment={**environment, **shared},
            variables=variables,
            folder=tmp_path,
        )

    return call


def ended(child: ChildProcess, seconds: float = 60) -> int:
    child._process.wait(seconds)
    code = child._process.returncode
    assert code is not None
    return code


def test_a_child_has_its_own_arguments_folder_and_variables(
    start: Callable[..., ChildProcess], tmp_path: Path
) -> None:
    described = []
    for number in ("1", "2"):
        assert ended(start("describe", number, "é\udc80", variables={"NUMBER": number})) == 0
        described.append(json.loads((tmp_path / "log").read_text()))
    assert [d["argv"] for d in described] == [["1", "é\udc80"], ["2", "é\udc80"]]
    assert [d["environment"]["NUMBER"] for d in described] == ["1", "2"]
    assert {d["folder"] for d in described} == {str(tmp_path)}
    assert all(d["leader"] for d in described)
    assert described[0]["server"] == described[1]["server"] != os.getpid()
    assert described[1]["handles"] <= 4, "the streams, and the directory that lists them"


@pytest.mark.parametrize(
    ("name", "code", "death"),
    [
        ("leave", 3, "its process ended with exit code 3"),
        ("fail", 1, "its process ended with exit code 1: ValueError: too bad"),
        ("missing", 1, "its process ended with exit code 1: AttributeError: "),
        ("crash", -11, "its process was killed by SIGSEGV"),
    ],
)
def test_how_it_ended_is_told(start: Callable[..., ChildProcess], name: str, code: int, death: str) -> None:
    child = start(name)
    assert ended(child) == code
    assert child.death().startswith(death)


def test_after_the_death_of_a_server_there_is_another(start: Callable[..., ChildProcess]) -> None:
    child = start("wait")
    psutil.Process(child._process.pid).parent().kill()
    assert ended(child) == -9
    assert ended(start("leave")) == 3


def test_a_server_is_started_ahead(start: Callable[..., ChildProcess], tmp_path: Path) -> None:
    (tmp_path / "slow.py").write_text("import time; time.sleep(1)\n")
    environment = {**child_environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "KIND": "ahead"}
    environment.pop("PYTEST_CURRENT_TEST", None)
    begun = time.perf_counter()
    forkserver.prepare_forks("forked_module:leave", ("slow",), environment)
    servers = list(forkserver._servers().values())
    child = ChildProcess(
        "forked_module:leave", log=tmp_path / "log", environment=environment, imports=("slow",)
    )
    assert time.perf_counter() - begun < 1, "this process waits for the imports"
    assert ended(child) == 3
    assert set(forkserver._servers().values()) <= set(servers), "it has another server than the prepared one"


def test_a_server_that_dies_before_it_forks_leaves_a_killed_child(
    start: Callable[..., ChildProcess], tmp_path: Path
) -> None:
    (tmp_path / "hangs.py").write_text("import time; time.sleep(600)\n")
    environment = {**child_environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}", "KIND": "dies"}
    child = ChildProcess(
        "forked_module:leave", log=tmp_path / "log", environment=environment, imports=("hangs",)
    )
    list(forkserver._servers().values())[-1]._process.kill()
    assert not child.running()
    assert child.death() == "its process was killed by SIGKILL"
    child.stop()


def test_few_idle_servers_are_kept_and_none_that_has_a_child(start: Callable[..., ChildProcess]) -> None:
    busy = start("wait", KIND="busy")
    for number in range(4):
        assert ended(start("leave", KIND=str(number))) == 3
    kinds = [dict(environment).get("KIND") for _, environment in forkserver._servers()]
    assert kinds == ["busy", "1", "2", "3"]
    assert busy.running()
    busy.stop()


def test_server_and_children_end_with_the_process_that_asked(
    start: Callable[..., ChildProcess], tmp_path: Path
) -> None:
    (tmp_path / "forked_module.py").write_text(MODULE)
    code = (
        "import time\nfrom pathlib import Path\n"
        "from ampaudit.core.child import ChildProcess, child_environment\n"
        "child = ChildProcess('forked_module:wait', log=Path('log'), environment=child_environment())\n"
        "print(child._process.pid, flush=True)\ntime.sleep(600)\n"
    )
    environment = {**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"}
    words = [sys.executable, "-c", code]
    with subprocess.Popen(words, stdout=subprocess.PIPE, cwd=tmp_path, env=environment) as asking:
        assert asking.stdout is not None
        child = psutil.Process(int(asking.stdout.readline()))
        server = child.parent()
        assert server is not None
        asking.kill()
    gone, alive = psutil.wait_procs([child, server], timeout=30)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE], gone


def test_a_stopped_child_takes_its_group_with_it(start: Callable[..., ChildProcess]) -> None:
    child = start("wait")
    started = time.monotonic()
    child.stop()
    assert ended(child) == -9
    assert time.monotonic() - started < 30
