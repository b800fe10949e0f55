"""Runs by segment: the report of a run of one batch after the other, with each weight read once."""

from __future__ import annotations

import dataclasses
import io
import itertools
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import safetensors.torch
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ampaudit
from ampaudit.core.errors import InputError, UsageError
from ampaudit.core.files import write_bytes
from ampaudit.core.formats import low_precision_format
from ampaudit.core.session import silent
from ampaudit.core.source_config import SourceConfig
from ampaudit.policy import load_policy, plain_fp32
from ampaudit.report.model import Report
from ampaudit.run import program as program_module
from ampaudit.run import segmented
from ampaudit.run.audit import run_audits
from ampaudit.run.config import RunConfig
from ampaudit.run.lockstep import GraphState
from ampaudit.run.program import Program, compile_program
from ampaudit.run.segmented import moved_to, pack_state, unpack_state
from ampaudit.run.segments import Group, Segment, best_ends, cut_evenly, cut_program
from ampaudit.run.share import Share
from ampaudit.source.open import open_source
from ampaudit.trace import TraceConfig, trace

CPU = torch.device("cpu")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        added: torch.Tensor = self.down(torch.relu(self.up(self.norm(x))) ** 2)
        return x + added


class Stack(nn.Module):
    """A transformer's skeleton: tied embeddings, a residual stream, optional dropout and overflow."""

    def __init__(self, width: int = 32, blocks: int = 5, scale: float = 1.0, dropout: float = 0.0) -> None:
        super().__init__()
        self.table = nn.Embedding(50, width)
        self.blocks = nn.ModuleList(Block(width) for _ in range(blocks))
        self.drop, self.scale = nn.Dropout(dropout), scale

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.table(ids)
        for block in self.blocks:
            x = self.drop(block(x))
        logits: torch.Tensor = (x * self.scale) @ self.table.weight.t()
        return logits


class Views(nn.Module):
    """Views and writes that live across many steps."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(16, 48), nn.Linear(16, 16)
        self.register_buffer("seen", torch.zeros(16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.first(x).chunk(3, -1)
        out = torch.zeros_like(v)
        out[:, :8] = self.second(q)[:, :8]
        self.seen.add_(x.mean(0))
        for _ in range(12):
            k = torch.tanh(self.second(k) + v)
        out[:, 8:] = k[:, 8:] * 3e4
        total: torch.Tensor = out + v
        return total


class Counting(nn.Module):
    """Code that reads a value, and so is traced along its path."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(24, 24) for _ in range(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
            if float(x.sum()) > 0:
                x = x * 2
        return x


def ids(count: int) -> list[torch.Tensor]:
    torch.manual_seed(1)
    return [torch.randint(0, 50, (2, 6 + number % 2)) for number in range(count)]


def floats(count: int, width: int) -> list[torch.Tensor]:
    torch.manual_seed(2)
    return [torch.randn(4, width) for _ in range(count)]


CASES: dict[str, tuple[Any, list[torch.Tensor]]] = {
    "fine": (lambda: Stack().eval(), ids(4)),
    "overflow": (lambda: Stack(scale=3e5).eval(), ids(4)),
    "dropout": (lambda: Stack(dropout=0.3).train(), ids(3)),
    "views": (lambda: Views().eval(), floats(3, 16)),
    "norm": (
        lambda: nn.Sequential(nn.Linear(16, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Linear(64, 16)).train(),
        floats(3, 16),
    ),
    "path": (lambda: Counting().eval(), floats(3, 24)),
}


def scanned(name: str, policy: Any, memory: str) -> Sequence[Report]:
    """Return reports without timings."""
    build, batches = CASES[name]
    torch.manual_seed(0)
    made = ampaudit.scan(
        build(), batches=batches, policy=policy, memory=memory, device="cpu", dtype="float16"
    )
    reports: Sequence[Report] = made.reports if isinstance(policy, list) else (made,)
    return [dataclasses.replace(report, timings={}) for report in reports]


MEMORY = "1GB"


@pytest.fixture
def many(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Cut every program into four segments, of groups of two steps; return their numbers."""
    seen: list[int] = []

    def cut(program: Program, limit: int, runs: int) -> Sequence[Segment]:
        del limit, runs
        seen.append(len(found := cut_evenly(program, 4)))
        return found

    monkeypatch.setattr(program_module, "GROUP_SIZE", 2)
    monkeypatch.setattr(segmented, "cut_program", cut)
    return seen


@pytest.mark.parametrize("policy", ["torch-cuda", "ampaudit", ["half", "torch-cuda"]], ids=str)
@pytest.mark.parametrize("name", CASES)
def test_the_report_is_that_of_a_run_batch_by_batch(name: str, policy: Any, many: list[int]) -> None:
    assert scanned(name, policy, MEMORY) == scanned(name, policy, "")
    assert min(many) > 1


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("many")
def test_boundaries_may_wait_on_disk(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = scanned(name, "torch-cuda", "")
    written: list[str] = []
    real = write_bytes

    def spy(path: Path, data: bytes, *, force: bool) -> None:
        written.append(path.name)
        real(path, data, force=force)

    monkeypatch.setattr(segmented, "write_bytes", spy)
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=0, total=1 << 40))
    assert scanned(name, "torch-cuda", MEMORY) == plain
    assert written


class Handed(Share):
    """Packs every state after each segment, and goes on with what was packed, as another process would."""

    keeps_states = True

    def __init__(self) -> None:
        self.states: dict[str, tuple[int, bytes]] = {}
        self.loads = 0

    def segments_passed(self, call: str) -> int:
        return self.states.get(call, (0, b""))[0]

    def load_state(self, call: str) -> bytes:
        self.loads += 1
        return self.states[call][1]

    def save_state(self, call: str, passed: int, count: int, pack: Any) -> None:
        self.states[call] = passed, pack()


@pytest.mark.parametrize("name", CASES)
@pytest.mark.usefixtures("many")
def test_another_process_goes_on_with_a_packed_state(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = scanned(name, "torch-cuda", "")
    share = Handed()
    monkeypatch.setattr(segmented.Passage, "fresh", property(lambda self: True))
    build, batches = CASES[name]
    torch.manual_seed(0)
    made = ampaudit.scan(
        build(),
        batches=batches,
        policy="torch-cuda",
        memory=MEMORY,
        session=ampaudit.Session(share=share),
        device="cpu",
        dtype="float16",
    )
    assert [dataclasses.replace(made, timings={})] == plain
    assert share.loads >= len(batches)


class Looped(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(256, 256) for _ in range(40))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


def test_each_weight_is_read_once_whatever_the_number_of_batches(tmp_path: Path) -> None:
    torch.manual_seed(0)
    made = Looped()
    safetensors.torch.save_model(made, str(tmp_path / "w.safetensors"))
    (tmp_path / "looped.py").write_text(
        "from tests.run.test_segments import Looped as Net\n"
        "import torch\n"
        "def get_model(): return Net().eval()\n"
        "def example_inputs(): return torch.ones(2, 256)\n"
        "def batches():\n    for k in range(16): yield torch.randn(2, 256)\n"
    )
    options = SourceConfig(stream=True, weights=tmp_path / "w.safetensors", batches=16)
    source = open_source(str(tmp_path / "looped.py"), options)
    assert source.release is not None
    weights = sum(p.numel() * 4 for p in source.model.parameters())
    runs: dict[int | None, Counter[int]] = {}
    for memory in (None, weights // 4):
        released: Counter[int] = Counter()

        def release(tensor: torch.Tensor, counted: Counter[int] = released) -> None:
            counted[tensor.data_ptr()] += 1

        form = low_precision_format("float16")
        rules = load_policy("torch-cuda")
        config = RunConfig(rules, rules, form, CPU, release=release, memory=memory)
        run_audits(source.model, source.batches, [config], silent)
        runs[memory] = released
    own = {p.data_ptr() for p in source.model.parameters()}
    assert {runs[weights // 4][address] for address in own} == {1}
    assert min(runs[None][address] for address in own) >= 16  # batch by batch, each batch reads all


def sizes_of(weights: Sequence[int]) -> dict[str, tuple[int, int]]:
    return {str(number): (number, size) for number, size in enumerate(weights)}


GROUPS = st.lists(
    st.tuples(st.frozensets(st.integers(0, 3), max_size=2), st.integers(0, 9), st.integers(0, 9)),
    min_size=1,
    max_size=9,
)


@given(GROUPS, st.lists(st.integers(1, 20), min_size=4, max_size=4), st.integers(5, 60))
def test_no_other_cuts_within_the_limit_leave_less_alive(
    drawn: list[tuple[frozenset[int], int, int]], weights: list[int], limit: int
) -> None:
    unit = 1 << 17  # above the fixed cost of a cut
    groups = [Group(frozenset(map(str, w)), peak * unit, after * unit) for w, peak, after in drawn]
    sizes = sizes_of([size * unit for size in weights])

    def fits(start: int, end: int) -> bool:
        read = frozenset().union(*(group.weights for group in groups[start:end]))
        peak = max(group.peak for group in groups[start:end])
        return sum(sizes[name][1] for name in read) + peak <= limit * unit

    def cost(ends: Sequence[int]) -> float:
        return sum(groups[end - 1].after + (1 << 16) for end in ends[:-1])

    every = [
        (*cuts, len(groups))
        for count in range(len(groups))
        for cuts in itertools.combinations(range(1, len(groups)), count)
        if all(fits(*pair) for pair in zip((0, *cuts), (*cuts, len(groups)), strict=True))
    ]
    if not every:
        with pytest.raises(UsageError, match="too little"):
            best_ends(groups, sizes, limit * unit)
        return
    found = tuple(best_ends(groups, sizes, limit * unit))
    assert found in every
    assert cost(found) == min(map(cost, every))


@pytest.fixture
def program() -> Program:
    rules = plain_fp32()
    torch.manual_seed(0)
    form = low_precision_format("float16")
    return compile_program(trace(Stack().eval(), (ids(1)[0],), {}, TraceConfig(rules, rules, form)), CPU)


def test_a_tight_limit_makes_more_segments_of_at_most_that_size(program: Program) -> None:
    (whole,) = cut_program(program, None)
    for parts in (2, 3):
        limit = whole.bytes // parts + 90_000
        segments = cut_program(program, limit)
        assert [segment.start for segment in segments] == [0, *(s.end for s in segments[:-1])]
        assert segments[-1].end == len(program.groups)
        assert all(segment.bytes <= limit for segment in segments)
    assert 1 < len(cut_evenly(program, 3)) <= 3
    with pytest.raises(UsageError, match="the largest group of ops needs"):
        cut_program(program, 1000)


def test_states_keep_shared_memory_strides_and_identity(program: Program) -> None:
    first, second, third = program.inputs[:3]
    base = torch.arange(24.0).view(4, 6)
    state = GraphState({first: (base, base), second: (base[:, 1:3], base.t())}, {third: (base, base)}, 2)
    for found in (unpack_state(pack_state(state, {"a": 1}), program, CPU, "it")[0], state):
        if found is state:
            moved_to(state, torch.device("meta"))
        whole, same = found.values[first]
        assert whole is same
        assert found.values[second][0].stride() == (6, 1)
        assert found.values[second][1].stride() == (1, 6)
        assert found.buffers[third][0].untyped_storage()._cdata == whole.untyped_storage()._cdata
        assert found.group == 2
    back = unpack_state(pack_state(GraphState({first: (base, base)}), {}), program, CPU, "it")[0]
    assert torch.equal(back.values[first][0], base)


def test_states_keep_lazy_conjugates_and_views_in_another_dtype(program: Program) -> None:
    first, second = program.inputs[:2]
    turned = torch.complex(torch.ones(3), torch.arange(3.0)).conj()
    parts = torch.view_as_real(torch.complex(torch.ones(3), torch.arange(3.0)))
    wanted = [turned.clone(), turned.imag.clone(), parts.clone(), torch.view_as_complex(parts).clone()]

    def state() -> GraphState:
        return GraphState(
            {first: (turned, turned.imag), second: (parts, torch.view_as_complex(parts))}, {}, 1
        )

    moved = state()
    moved_to(moved, CPU)
    for found in (moved, unpack_state(pack_state(state(), {}), program, CPU, "it")[0]):
        got = [*found.values[first], *found.values[second]]
        assert all(torch.equal(one, other) for one, other in zip(got, wanted, strict=True))
        assert got[2].untyped_storage()._cdata == got[3].untyped_storage()._cdata


def test_a_state_that_reads_beyond_its_memory_is_refused(program: Program) -> None:
    data = pack_state(GraphState({program.inputs[0]: (torch.ones(2, 3),) * 2}, {}, 1), {})
    found = torch.load(io.BytesIO(data), weights_only=False)
    (view,) = {pair[0] for pair in found["tables"][0].values()}
    found["tables"][0] = {program.inputs[0].name: (view._replace(shape=(2, 4000)),) * 2}
    file = io.BytesIO()
    torch.save(found, file)
    with pytest.raises(InputError, match="a tensor beyond its memory"):
        unpack_state(file.getvalue(), program, CPU, "it")


@pytest.mark.parametrize("data", [b"", b"no state", b"PK\x03\x04", pack_state(GraphState({}, {}, -1), {})])
def test_bytes_that_are_no_state_are_refused(program: Program, data: bytes) -> None:
    with pytest.raises(InputError, match="it is not a state of this audit"):
        unpack_state(data, program, CPU, "it")


def test_a_model_without_ops_fits_any_memory() -> None:
    report = ampaudit.scan(torch.nn.Identity(), torch.randn(2, 4), policy="half", memory="1KB")
    assert report.exit_code == 0
