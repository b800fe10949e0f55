"""``ampaudit bench``: whole runs, their reports, and the command."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from rich.console import Console
from torch import nn

from ampaudit.audit.inputs import as_source
from ampaudit.benchmarking import run as running
from ampaudit.benchmarking.config import BenchConfig
from ampaudit.benchmarking.run import ModeRun, bench
from ampaudit.core.errors import UsageError
from ampaudit.devices.catalogue import device_named
from ampaudit.render.blocks import Table
from ampaudit.render.json import to_json
from ampaudit.render.render import for_terminal
from ampaudit.report.bench import BenchReport
from ampaudit.views.bench import bench_facts, bench_tables
from ampaudit.views.training_plot import plot_bench
from tests.support.bench import bert
from tests.support.paths import ROOT

Cli = Callable[..., subprocess.CompletedProcess[str]]


@pytest.mark.skipif(torch.cuda.is_available(), reason="has CUDA")
def test_a_device_that_is_absent_is_refused_at_once() -> None:
    with pytest.raises(UsageError, match="cuda"):
        BenchConfig(device="cuda").check()


def test_an_interrupted_run_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = running.time_step, 0

    def time_step(run: ModeRun, device: torch.device) -> None:
        nonlocal asked
        asked += 1
        if asked == 6:
            raise KeyboardInterrupt
        real(run, device)

    monkeypatch.setattr(running, "time_step", time_step)
    source = as_source(nn.Linear(8, 8).eval(), batches=[torch.ones(2, 8)])
    report = bench(source, modes=["fp32", "bf16"], sizes=(2, 4, 8), repeats=2)
    assert report.interrupted
    # two steps of both modes with two samples, then one of the first with four
    assert [(row.mode, row.batch_size) for row in report.rows] == [("fp32", 2), ("bf16", 2), ("fp32", 4)]
    assert all(row.seconds for row in report.rows)
    asked = 5
    with pytest.raises(KeyboardInterrupt):
        bench(source, modes=["fp32"], repeats=1)


@pytest.fixture(scope="module")
def report() -> BenchReport:
    torch.manual_seed(0)
    settings = BenchConfig(
        modes=["fp32", "tf32", "half"], sizes=(2, 8), repeats=2, target=device_named("rtx3090")
    )
    return bench(bert(False), config=settings)


def test_the_table_fits_and_says_it_all(report: BenchReport) -> None:
    stream = io.StringIO()
    Console(width=110, file=stream).print(for_terminal(report))
    text = stream.getvalue()
    for expected in (
        "Batch size 2",
        "Batch size 8",
        "samples/s",
        "reference",
        "not supported",
        "at best",
        "roofline",
    ):
        assert expected in text
    assert max(map(len, text.splitlines())) <= 110
    assert (running.CPU_NOTE in report.notes) is not torch.cuda.is_available()


def test_what_kernels_took_stands_in_the_table(report: BenchReport) -> None:
    rows = tuple(replace(row, workspace_bytes=0) for row in report.rows)
    (table,) = bench_tables(replace(report, rows=rows))[1].blocks
    other = replace(report, rows=(replace(rows[0], workspace_bytes=3_000_000), *rows[1:]))
    (wider,) = bench_tables(other)[1].blocks
    assert isinstance(table, Table)
    assert isinstance(wider, Table)
    assert "workspace" not in table.heads
    assert wider.heads[-1] == "workspace"
    assert [str(row[-1]) for row in wider.rows] == ["3 MB", ""]
    assert "Workspace" in dict(bench_facts(other))


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_the_picture_is_written(report: BenchReport, tmp_path: Path, suffix: str) -> None:
    plot_bench(report, tmp_path / f"bench{suffix}")
    assert (tmp_path / f"bench{suffix}").stat().st_size > 5000
    with pytest.raises(UsageError, match="unknown kind of picture"):
        plot_bench(report, tmp_path / "bench.txt")
    with pytest.raises(UsageError, match="no mode ran"):
        plot_bench(replace(report, rows=()), tmp_path / f"none{suffix}")


def test_from_the_command_line(cli: Cli, tmp_path: Path) -> None:
    example = ROOT / "examples" / "t5_feed_forward.py"
    done = cli(
        *("bench", example, "--modes", "fp32,bf16", "--batch-size", "2,4", "--repeats", "2"),
        *("--format", "json", "--plot", tmp_path / "bench.png"),
    )
    assert done.returncode == 0, done.stderr
    document = json.loads(done.stdout)
    assert [(row["mode"], row["batch_size"]) for row in document["rows"]] == [
        ("fp32", 2), ("bf16", 2), ("fp32", 4), ("bf16", 4),
    ]  # fmt: skip
    assert all(row["peak_bytes"] and row["seconds"] for row in document["rows"])
    assert (tmp_path / "bench.png").exists()
    assert "USDT" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "part"),
    [
        (("--batch-size", "0"), "positive integers"),
        (("--batch-size", "8,x"), "positive integers"),
        (("--modes", "fp16"), "no such mode"),
        (("--for", "abacus"), "unknown device 'abacus'"),
        (("--device", "cuda"), "cuda is not available here"),
        (("--plot", "nowhere/x.png"), "no such directory"),
        (("--plot", "x.txt"), "unknown kind of picture"),
    ],
)
def test_mistakes_are_one_clear_line(cli: Cli, arguments: tuple[str, ...], part: str) -> None:
    done = cli("bench", ROOT / "examples" / "t5_feed_forward.py", *arguments, CUDA_VISIBLE_DEVICES="")
    assert done.returncode == 2
    assert part in done.stderr
    assert "Traceback" not in done.stderr
    assert done.stdout == ""


def test_the_experiment_runs_in_small(cli: Cli, tmp_path: Path) -> None:
    """EfficientNet-B0 with one output, as examples/efficientnet_b0.py has it, with small images on a CPU."""
    done = cli(
        *(
            "bench",
            ROOT / "examples" / "efficientnet_b0.py",
            "--train",
            "--batch-size",
            "2",
            "--repeats",
            "1",
        ),
        *("--modes", "fp32,bf16", "-o", tmp_path / "bench.json"),
        AMPAUDIT_IMAGE="32x32",
    )
    assert done.returncode == 0, done.stderr
    fp32, bf16 = json.loads((tmp_path / "bench.json").read_text())["rows"]
    assert fp32["memory"]["weights"] > 4 * 4_008_829  # and the running statistics of its norms
    tensors = [row["peak_bytes"] - row["workspace_bytes"] for row in (fp32, bf16)]
    assert tensors[1] < 0.6 * tensors[0]


@pytest.mark.parametrize("form", ["html", "markdown", "csv", "json"])
def test_a_saved_bench_is_shown_again(cli: Cli, tmp_path: Path, report: BenchReport, form: str) -> None:
    (tmp_path / "b.json").write_text(to_json(report))
    done = cli("report", tmp_path / "b.json", "--format", form)
    assert done.returncode == 0, done.stderr
    assert all(text in done.stdout for text in ("fp32", "half"))
    assert cli("report", tmp_path / "b.json", "--format", "sarif").returncode == 2


def test_the_documented_table_is_the_kept_result() -> None:
    path = ROOT / "benchmarks" / "tables.py"
    spec = importlib.util.spec_from_file_location("tables", path)
    assert spec is not None
    assert spec.loader is not None
    tables = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tables)
    assert "| fp32 |" in tables.table()
    for page in tables.PAGES:
        text = page.read_text(encoding="utf-8")
        assert tables.table() in text
        assert tables.rewritten(text) == text, "python -m benchmarks.tables"
