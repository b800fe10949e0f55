"""``ampaudit bench``: memory against the allocator, predictions against it, and modes that cannot run."""

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
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from torch import nn

import ampaudit.bench.run as running
from ampaudit.audit.inputs import as_source
from ampaudit.bench.batches import moved, resized, size_of_batch
from ampaudit.bench.config import BenchConfig
from ampaudit.bench.devices.catalogue import device_named
from ampaudit.bench.estimate import Counter, seconds_at_best, work_of
from ampaudit.bench.largest import search
from ampaudit.bench.memory import live_bytes, measured_peak
from ampaudit.bench.mode_runs import Lane
from ampaudit.bench.names import parse_modes
from ampaudit.bench.run import bench
from ampaudit.core.config import SourceConfig
from ampaudit.core.errors import InputError, UsageError
from ampaudit.render.bench_plot import plot_bench
from ampaudit.render.bench_tables import bench_facts, bench_tables
from ampaudit.render.bench_text import render_bench
from ampaudit.render.json import to_json
from ampaudit.report.bench import BenchReport, BenchRow
from ampaudit.source import Batch, ModelSource
from ampaudit.source.open import open_source
from tests.support.paths import ROOT

CPU = torch.device("cpu")
Cli = Callable[..., subprocess.CompletedProcess[str]]


def bert(train: bool) -> ModelSource:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=2, hidden_size=128, num_attention_heads=4, intermediate_size=512, vocab_size=2000
    )
    made = as_source(BertModel(config).train(train), batches=[{"input_ids": torch.randint(0, 2000, (8, 32))}])
    return replace(made, loss=lambda output: output.last_hidden_state.float().square().mean())


def resnet(train: bool) -> ModelSource:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic")
    pixels = {"pixel_values": torch.randn(4, 3, 48, 48)}
    made = as_source(ResNetForImageClassification(config).train(train), batches=[pixels])
    return replace(made, loss=lambda output: output.logits.float().square().mean())


def example(name: str) -> Callable[[bool], ModelSource]:
    return lambda train: open_source(str(ROOT / "examples" / name), SourceConfig(train=train))


def rows_of(source: ModelSource, modes: str, **options: object) -> dict[str, BenchRow]:
    report = bench(source, modes=modes.split(","), repeats=1, **options)  # type: ignore[arg-type]
    return {row.mode: row for row in report.rows}


# what is measured


def test_the_peak_of_a_step_is_what_the_allocator_gave() -> None:
    def step() -> torch.Tensor:
        first = torch.ones(1000)  # 4,000 bytes
        second = torch.ones(2000)  # 12,000 together
        del first
        third = torch.ones(500)  # 10,000
        return second.sum() + third.sum()

    step()
    assert measured_peak(step, 0, CPU).total == pytest.approx(12_000, abs=64)
    assert measured_peak(step, 5_000, CPU).total == pytest.approx(17_000, abs=64)


@pytest.mark.parametrize(
    ("kind", "workspace"), [("CompositeExplicitAutograd", 40_000), ("CompositeImplicitAutograd", 0)]
)
def test_what_a_kernel_takes_for_itself_is_told_apart(kind: str, workspace: int) -> None:
    """An op of our own, as libraries choose kernels by the processor; a composite op is no kernel."""

    def kernel(x: torch.Tensor) -> torch.Tensor:
        own, out = torch.empty(10_000), torch.empty(1_000)
        own.fill_(1.0)
        return out.fill_(float(own[0]))

    with torch.library._scoped_library("ampaudit_test", "DEF") as library:
        library.define("op(Tensor x) -> Tensor")
        library.impl("op", kernel, kind)
        step = lambda: torch.ops.ampaudit_test.op(torch.ones(500))  # noqa: E731
        step()
        found = measured_peak(step, 0, CPU)
    assert found.total == pytest.approx(2_000 + 40_000 + 4_000, abs=64)
    assert found.workspace == pytest.approx(workspace, abs=64)


def test_bytes_held_count_shared_memory_once() -> None:
    model = nn.Sequential(nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False))
    assert live_bytes(model, None) == 2 * 64 * 4
    model[1].weight = model[0].weight
    assert live_bytes(model, None) == 64 * 4
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
    assert live_bytes(model, optimizer) == 4 * 64 * 4 + 4  # weight, gradient, two moments, a step count


ALL = "fp32,autocast,half,bf16,converted"
MODELS = {
    "bert": (bert, False), "bert training": (bert, True),
    "resnet": (resnet, False), "resnet training": (resnet, True),
    "text training": (example("training/text.py"), True),
    "digits training": (example("training/digits.py"), True),
}  # fmt: skip


@pytest.mark.parametrize(("made", "train"), MODELS.values(), ids=MODELS)
def test_memory_is_predicted_but_for_what_kernels_take(
    made: Callable[[bool], ModelSource], train: bool
) -> None:
    """What kernels take for themselves differs between processors; all the rest is predicted, on any."""
    for mode, row in rows_of(made(train), ALL, train=train).items():
        assert row.status == "ok", row.note
        assert row.memory is not None, row.note
        assert row.peak_bytes is not None
        assert row.workspace_bytes is not None
        assert row.peak_bytes - row.workspace_bytes == pytest.approx(row.memory.peak, rel=0.02), mode


def test_weights_gradients_and_states_are_exact() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 8))
    count = sum(p.numel() for p in model.parameters())
    source = replace(
        as_source(model.train(), batches=[torch.randn(4, 64)]),
        loss=lambda output: output.float().square().mean(),
    )
    found = rows_of(source, "fp32,half,autocast", train=True)
    for mode, size in (("fp32", 4), ("autocast", 4), ("half", 2)):
        memory = found[mode].memory
        assert memory is not None
        assert memory.weights == size * count
        assert memory.optimizer == 2 * size * count + 4 * len(list(model.parameters()))
        assert memory.peak == sum(
            (memory.weights, memory.masters, memory.gradients, memory.optimizer, memory.activations)
        )
    plain = rows_of(replace(source, model=model.eval()), "fp32,half,converted", policy="half")
    assert [found.memory.weights for found in plain.values() if found.memory] == [
        4 * count,
        2 * count,
        2 * count,
    ]


def test_masters_are_told_apart_from_weights() -> None:
    model = nn.Sequential(nn.Linear(64, 64), nn.BatchNorm1d(64))
    source = replace(
        as_source(model.train(), batches=[torch.randn(4, 64)]), loss=lambda output: output.float().mean()
    )
    memory = rows_of(source, "converted", train=True, policy="apex-o2")["converted"].memory
    assert memory is not None
    assert memory.masters == 4 * (64 * 64 + 64)  # O2 keeps the norm as it is
    assert memory.weights == 4 * (4 * 64) + 8  # weight, bias, two running statistics, and their count
    pure = rows_of(source, "converted", train=True, policy="apex-o3")["converted"]
    assert pure.status == "ok", pure.note
    assert pure.memory is not None
    assert pure.memory.masters == 0


def test_the_model_is_left_as_it_was() -> None:
    source = bert(True)
    before = {name: value.clone() for name, value in source.model.state_dict().items()}
    rows_of(source, "fp32,half,converted", train=True)
    assert all(torch.equal(before[name], value) for name, value in source.model.state_dict().items())
    assert all(p.grad is None for p in source.model.parameters())


def test_locked_flags_of_torch_do_no_harm() -> None:
    """torch.testing's tools lock the global flags of cudnn for the whole process."""
    torch.backends.disable_global_flags()
    assert (
        rows_of(as_source(nn.Linear(8, 8).eval(), batches=[torch.ones(2, 8)]), "fp32")["fp32"].status == "ok"
    )


def test_accuracy_stands_beside_each_mode() -> None:
    found = rows_of(bert(False), "fp32,half,bf16,autocast")
    assert found["fp32"].sqnr_db is None
    assert 40 < found["half"].sqnr_db < 90  # type: ignore[operator]
    assert found["bf16"].sqnr_db < found["half"].sqnr_db  # type: ignore[operator]
    large = nn.Linear(8, 8)
    with torch.no_grad():
        large.weight.fill_(1e4)
    broken = rows_of(as_source(large.eval(), batches=[torch.ones(2, 8)]), "fp32,half")
    assert broken["fp32"].finite is True
    assert broken["half"].finite is False
    assert broken["half"].status == "ok"


# work and estimates


def test_operations_are_counted_as_the_formula_says() -> None:
    weight, x = torch.randn(16, 32), torch.randn(8, 32)
    with Counter() as counter:
        torch.nn.functional.linear(x.half(), weight.half())
    work = work_of(counter.ops, tf32=False)
    assert work.flops == 2 * 8 * 16 * 32
    assert work.fast_share == 1.0
    assert work.cast_bytes == (8 * 32 + 16 * 32) * (4 + 2)
    assert work.bytes_moved == work.cast_bytes + 2 * (8 * 32 + 16 * 32 + 8 * 16)
    with Counter() as counter:
        torch.nn.functional.linear(x, weight)
    assert work_of(counter.ops, tf32=False).fast_share == 0.0
    assert work_of(counter.ops, tf32=True).fast_share == 1.0
    with Counter() as counter:
        _ = x > 0  # another dtype, and no conversion
    assert work_of(counter.ops, tf32=False).cast_bytes == 0


@pytest.mark.parametrize("groups", [1, 4, 8])
@pytest.mark.parametrize("transposed", [False, True])
def test_both_gradients_of_a_convolution_cost_what_it_costs(groups: int, transposed: bool) -> None:
    kind = nn.ConvTranspose2d if transposed else nn.Conv2d
    layer = kind(8, 16, 3, padding=1, groups=groups, bias=False)
    x = torch.randn(2, 8, 10, 12, requires_grad=True)
    with Counter() as forward:
        y = layer(x)
    with Counter() as back:
        y.sum().backward()
    # every output is a sum over 3 x 3 places of the channels of its group; all but the borders
    assert work_of(forward.ops, tf32=False).flops == 2 * (2 * 10 * 12) * 9 * 8 * 16 // groups
    assert work_of(back.ops, tf32=False).flops == 2 * work_of(forward.ops, tf32=False).flops


def test_the_roofline_takes_the_longer_of_arithmetic_and_bytes() -> None:
    v100 = device_named("v100")
    big = torch.randn(512, 512, dtype=torch.float16)
    with Counter() as counter:
        big @ big
    seconds = seconds_at_best(counter.ops, v100, tf32=False)
    flops, moved = 2 * 512**3, 2 * 512 * 512 * 2  # the same factor twice is read once
    assert seconds == pytest.approx(max(flops / 125e12, moved / 900e9))
    with Counter() as counter:
        big + 1
    assert seconds_at_best(counter.ops, v100, tf32=False) == pytest.approx(2 * 512 * 512 * 2 / 900e9)
    assert seconds_at_best(counter.ops, device_named("cpu"), tf32=False) is None


def test_a_named_device_gives_estimates_and_cudas_autocast() -> None:
    found = rows_of(bert(False), "fp32,autocast,half", target=device_named("v100"))
    assert found["half"].at_best < found["fp32"].at_best  # type: ignore[operator]
    assert "torch.autocast('cuda', float16)" in found["autocast"].how
    assert found["autocast"].work.fast_share > 0.9  # type: ignore[union-attr]
    assert found["autocast"].work.cast_bytes > 0  # type: ignore[union-attr]


@given(st.integers(0, 5000))
def test_the_search_finds_the_largest(limit: int) -> None:
    asked: list[int] = []

    def fits(size: int) -> bool:
        asked.append(size)
        return size <= limit

    found = search(fits)
    assert found <= limit
    assert found >= limit - limit // 32
    assert found == limit or limit > 64
    assert len(asked) < 30


def test_the_largest_batch_fits_and_a_larger_one_does_not() -> None:
    card = replace(device_named("v100"), memory_gb=0.02)
    settings = BenchConfig(modes=["fp32", "half", "converted"], repeats=1, target=card, max_batch=True)
    report = bench(bert(False), config=settings)
    sizes = {one.mode: one.batch_size for one in report.largest}
    assert set(sizes) == {"fp32", "half"}  # a graph is for one size
    assert sizes["half"] > 1.8 * sizes["fp32"] > 0
    at = bench(bert(False), config=settings, sizes=(sizes["fp32"],), modes=["fp32"], max_batch=False)
    own = at.rows[0].workspace_bytes or 0
    # the size is found to 1/32
    assert (at.rows[0].peak_bytes or 0) - own == pytest.approx(20e6, rel=1 / 32 + 0.02)


# batches


def test_batches_are_repeated_or_cut() -> None:
    images, labels, mask = torch.arange(12.0).reshape(3, 4), torch.arange(3), torch.ones(7, 7)
    batch = Batch((images,), {"mask": mask}, (images, labels))
    assert size_of_batch(batch) in (3, 7)
    batch = Batch((images,), {}, (images, labels))
    larger = resized(batch, 7)
    assert larger.args[0].shape == (7, 4)
    assert torch.equal(larger.args[0][3:6], images)
    assert larger.item[1].tolist() == [0, 1, 2, 0, 1, 2, 0]
    assert larger.item[0] is larger.args[0]
    assert resized(batch, 2).item[1].tolist() == [0, 1]
    assert resized(batch, 3) is batch
    assert moved(batch, CPU, torch.float16).item[1].dtype is torch.int64
    with pytest.raises(InputError, match="no dimension of samples"):
        resized(Batch((torch.tensor(1.0),)), 4)


# what cannot run


class Picky(nn.Module):
    """Refuses 16 bits, as code with a check of its own does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.inner.weight.dtype is not torch.float32:
            raise TypeError("float32 weights, please")
        return self.inner(x)


def test_a_mode_that_fails_is_a_row() -> None:
    found = rows_of(as_source(Picky().eval(), batches=[torch.ones(2, 8)]), "fp32,tf32,half")
    assert found["fp32"].status == "ok"
    assert found["half"].status == "failed"
    assert found["half"].note == "TypeError: float32 weights, please"
    if not torch.cuda.is_available():
        assert found["tf32"].status == "not supported"


@pytest.mark.parametrize("kind", [RuntimeError, MemoryError, torch.OutOfMemoryError])
def test_out_of_memory_is_a_row(monkeypatch: pytest.MonkeyPatch, kind: type[Exception]) -> None:
    source = as_source(nn.Linear(8, 8).eval(), batches=[torch.ones(2, 8)])
    real = nn.Linear.forward

    def forward(self: nn.Linear, x: torch.Tensor) -> torch.Tensor:
        if self.weight.dtype is torch.float16:
            raise kind(
                "[enforce fail at alloc_cpu.cpp:121] err == 0. DefaultCPUAllocator: can't allocate memory"
            )
        return real(self, x)

    monkeypatch.setattr(nn.Linear, "forward", forward)
    found = rows_of(source, "fp32,half")
    assert found["half"].status == "out of memory"
    assert found["fp32"].status == "ok"


def test_an_interrupted_run_keeps_what_is_finished(monkeypatch: pytest.MonkeyPatch) -> None:
    real, asked = running.timed, 0

    def timed(lane: Lane, device: torch.device) -> None:
        nonlocal asked
        asked += 1
        if asked == 6:
            raise KeyboardInterrupt
        real(lane, device)

    monkeypatch.setattr(running, "timed", timed)
    source = as_source(nn.Linear(8, 8).eval(), batches=[torch.ones(2, 8)])
    report = bench(source, modes=["fp32", "bf16"], sizes=(2, 4, 8), repeats=2)
    assert report.interrupted
    # two steps of both modes with two samples, then one of the first with four
    assert [(row.mode, row.batch_size) for row in report.rows] == [("fp32", 2), ("bf16", 2), ("fp32", 4)]
    assert all(row.seconds for row in report.rows)
    asked = 5
    with pytest.raises(KeyboardInterrupt):
        bench(source, modes=["fp32"], repeats=1)


@pytest.mark.parametrize("text", ["fp31", "", "half,fp8"])
def test_modes_that_are_none(text: str) -> None:
    with pytest.raises(UsageError, match="--modes"):
        parse_modes(text)


# reports


@pytest.fixture(scope="module")
def report() -> BenchReport:
    torch.manual_seed(0)
    settings = BenchConfig(
        modes=["fp32", "tf32", "half"], sizes=(2, 8), repeats=2, target=device_named("rtx3090")
    )
    return bench(bert(False), config=settings)


def test_the_table_fits_and_says_it_all(report: BenchReport) -> None:
    stream = io.StringIO()
    Console(width=110, file=stream).print(render_bench(report))
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


def test_what_kernels_took_stands_in_the_table(report: BenchReport) -> None:
    rows = tuple(replace(row, workspace_bytes=0) for row in report.rows)
    table, own = bench_tables(replace(report, rows=rows))[1], replace(rows[0], workspace_bytes=3_000_000)
    other = replace(report, rows=(own, *rows[1:]))
    assert "workspace" not in table.heads
    assert bench_tables(other)[1].heads[-1] == "workspace"
    assert [row[-1] for row in bench_tables(other)[1].rows] == ["3 MB", ""]
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
        (("--batch-size", "0"), "whole numbers from 1"),
        (("--batch-size", "8,x"), "whole numbers from 1"),
        (("--modes", "fp16"), "no such mode"),
        (("--for", "abacus"), "unknown device 'abacus'"),
        (("--device", "cuda"), "no usable CUDA device"),
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


@pytest.mark.gpu
@pytest.mark.parametrize("train", [False, True])
def test_memory_and_time_on_a_gpu(train: bool) -> None:
    modes = "fp32,tf32,autocast,half,bf16,converted"
    for row in rows_of(bert(train), modes, train=train, device="cuda").values():
        assert row.status in ("ok", "not supported"), row.note
        if row.status == "ok":
            assert row.memory is not None
            assert row.peak_bytes is not None
            assert row.peak_bytes >= row.memory.weights
            assert row.seconds is not None


@pytest.mark.slow
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
        assert tables.rewritten(text) == text, "python benchmarks/tables.py"


def test_a_prediction_that_is_not_possible_says_why() -> None:
    class Counting(nn.Module):
        """Branches on data, which a tensor without data does not have."""

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x * 2 if float(x.sum()) > 0 else x

    row = rows_of(as_source(Counting().eval(), batches=[torch.ones(2, 8)]), "fp32")["fp32"]
    assert row.status == "ok"
    assert row.memory is None
    assert row.note.startswith("no prediction: DataDependentOutputException")
