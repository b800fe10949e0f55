"""DDP, FSDP2 and tensor parallelism train as one process does, and all ranks skip the same step."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.support.training_ranks import BROKEN, SCALE, STEPS, Seen, alone, seen_by_ranks

POLICIES = ("apex-o0", "apex-o2")
RUNS = [
    *(f"{kind} {policy}" for kind in ("ddp", "fsdp", "tp") for policy in POLICIES),
    *("fsdp apex-o0 told", "fsdp apex-o0 fused", "tp apex-o0 whole"),
]
# in one process, sums of float32 are taken in another order; that can round a 16-bit value the other way
NEAR = {"apex-o0": 1e-5, "apex-o2": 1e-3}
one_process = functools.cache(alone)


@pytest.fixture(scope="module", params=[2, 4])
def ranks(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> list[Mapping[str, Seen]]:
    folder: Path = tmp_path_factory.mktemp("ranks")
    return seen_by_ranks(folder, request.param, POLICIES)


@pytest.mark.parametrize("run", RUNS)
def test_ranks_train_as_one_process_does(ranks: list[Mapping[str, Seen]], run: str) -> None:
    policy = run.split()[1]
    expected = one_process(policy)
    for seen in (found[run] for found in ranks):
        assert seen.losses == pytest.approx(expected.losses, rel=NEAR[policy])
        assert seen.weights == ranks[0][run].weights
        assert seen.weights == pytest.approx(expected.weights, abs=NEAR[policy])


@pytest.mark.parametrize("run", RUNS)
def test_nan_on_one_rank_alone_skips_the_step_on_all(ranks: list[Mapping[str, Seen]], run: str) -> None:
    halved = [SCALE] * BROKEN + [SCALE / 2] * (STEPS - BROKEN)
    for seen in (found[run] for found in ranks):
        assert seen.scales == halved
        assert [step for step, skipped in enumerate(seen.skipped) if skipped] == [BROKEN]


@pytest.mark.parametrize("run", RUNS)
def test_each_rank_watches_its_own_part_and_knows_who_saw_nan(
    ranks: list[Mapping[str, Seen]], run: str
) -> None:
    for rank, seen in enumerate(found[run] for found in ranks):
        assert seen.peaks > 0
        own = f"the part that rank {rank} of {len(ranks)} holds"
        who = f"gradients of rank {len(ranks) - 1} were inf or NaN in 1 step: all ranks skipped"
        notes = [note for note in seen.notes if not note.startswith("judged by float16, the format that")]
        found = [any(own in note for note in notes), who in notes, len(notes)]
        assert found == ([False, False, 0] if run.startswith("ddp") else [True, True, 2])


@pytest.mark.parametrize("run", RUNS)
def test_a_parallel_model_is_traced_once(ranks: list[Mapping[str, Seen]], run: str) -> None:
    assert [found[run].traces for found in ranks] == [1] * len(ranks)


def test_a_rank_without_gradients_follows_the_others(ranks: list[Mapping[str, Seen]]) -> None:
    assert [found["absent"].scales for found in ranks] == [[65536.0, 32768.0, 32768.0]] * len(ranks)
    assert ranks[0]["absent"].weights == [0.5] * 3
    assert all(found["absent"].weights == [1.0] * 3 for found in ranks[1:])


def test_emulation_adds_up_what_ranks_hold_before_it_rounds(ranks: list[Mapping[str, Seen]]) -> None:
    """2049 is a tie, which rounds to 2048; its addends are numbers of float16."""
    assert [(f["rounded"].losses, f["rounded"].weights) for f in ranks] == [([2048.0], [2048.0])] * len(ranks)
