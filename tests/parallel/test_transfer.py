"""What ranks send each other: all records in order, few at a time, and no more back than is needed."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial

import pytest
from torch.distributed import HashStore, TCPStore  # type: ignore[attr-defined]

from ampaudit.core.errors import AuditError, InputError, RunFailed
from ampaudit.core.sites import SiteId
from ampaudit.parallel.identity import Identity
from ampaudit.parallel.ranks import Board, PipelineShare, RankShare
from ampaudit.run.measure import Observation
from ampaudit.run.record import RunRecord
from ampaudit.run.share import Failure, PartRecords, join_parts

RANKS, BATCHES = 3, 150
SAME = Identity("1", "2", "model", "inputs", BATCHES, "policies", "options")
SITE = SiteId("layer/linear")


def record(number: int) -> RunRecord:
    """Return a record whose sums are rounded differently in any other order."""
    seen = Observation(elements=4, batches=1, ref_peak=float(number), err_sq=0.1 * 3.0 ** (number % 40))
    return RunRecord(
        "cpu", "native", batches=1, observations={SITE: seen}, masks={SITE}, input_peaks={0: {"x": 2.0}}
    )


class Counting(Board):
    """Counts the records that lie on the board of all ranks."""

    lying: set[str]
    most: list[int]
    lock: threading.Lock

    def put(self, key: str, data: bytes) -> None:
        with self.lock:
            if "/records/" in key:
                self.lying.add(key)
                self.most[0] = max(self.most[0], len(self.lying))
        super().put(key, data)

    def take(self, key: str) -> bytes:
        found = super().take(key)
        assert not self.has(key)
        with self.lock:
            self.lying.remove(key)
        return found


@pytest.fixture
def board() -> type[Counting]:
    Counting.lying, Counting.most, Counting.lock = set(), [0], threading.Lock()
    return Counting


def joined(
    rank: int, store: HashStore, board: type[Counting], failures: dict[int, Failure]
) -> list[RunRecord] | AuditError:
    share = RankShare(board(store), rank, RANKS)
    share.describe("model.py", SAME)
    own = {number: [record(number)] for number in range(rank, BATCHES, RANKS)}
    try:
        for phase in ("auditing", "re-auditing"):
            found = share.joined(phase, PartRecords(dict(own), failures.get(rank)), lambda *_: None)
    except AuditError as error:
        return error
    return found


def of_all(
    board: type[Counting], failures: dict[int, Failure] | None = None
) -> list[list[RunRecord] | AuditError]:
    """Return what each rank has in the end, or its error."""
    one = partial(joined, store=HashStore(), board=board, failures=failures or {})
    with ThreadPoolExecutor(RANKS) as pool:
        return list(pool.map(one, range(RANKS)))


def test_rank_0_has_the_records_of_all_in_order(board: type[Counting]) -> None:
    whole, *_ = of_all(board)
    assert whole == join_parts([PartRecords({number: [record(number)] for number in range(BATCHES)})])
    assert 0 < board.most[0] <= 64 * (RANKS - 1) / RANKS + 1
    assert not board.lying


def test_the_others_have_what_measured_rules_look_at(board: type[Counting]) -> None:
    _, *others = of_all(board)
    seen = {SITE: Observation(ref_peak=float(BATCHES - 1))}
    rest = RunRecord("cpu", "native", observations=seen, masks={SITE}, input_peaks={0: {"x": 2.0}})
    assert others == [[rest]] * (RANKS - 1)


def test_all_ranks_have_the_first_error(board: type[Counting]) -> None:
    failures = {1: Failure(7, "RunFailed", "the later", "."), 2: Failure(5, "InputError", "the first", ".")}
    found = of_all(board, failures)
    assert [str(error) for error in found] == [str(InputError("the first", hint="."))] * RANKS


def test_a_record_that_cannot_be_read_is_the_error_of_all(
    board: type[Counting], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("ampaudit.parallel.ranks.records_to_json", lambda _: b'[{"device": 3}]')
    first, *others = of_all(board)
    assert "rank 1: " in str(first)
    assert [str(error) for error in others] == [str(first)] * (RANKS - 1)
    assert not isinstance(first, RunFailed)


def test_an_entry_may_be_larger_than_a_value_of_the_store() -> None:
    """A pipeline's state of 20 MB once ended the connection."""
    board = Board(TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False))
    data = bytes(range(256)) * 80_000
    board.put("state", data)
    assert board.take("state") == data
    assert not board.has("state")


def test_a_rank_that_waits_for_another_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 0 once ended a pipeline whose later ranks had nothing to run for as long as the limit."""
    monkeypatch.setenv("AMPAUDIT_RANK_TIMEOUT", "1")
    store, over = HashStore(), threading.Event()

    def beat() -> None:
        while not over.wait(0.1):
            for rank in range(RANKS):
                store.add(f"alive/{rank}", 1)

    def pipe(rank: int) -> object:
        share = PipelineShare(Board(store), rank, RANKS)
        segment = share.local_segments(RANKS).start
        share.mine("auditing", 0)
        if rank == 0:
            time.sleep(2)  # a long first segment
        elif share.load_state("call") != b"state":
            return None
        share.save_state("call", segment + 1, RANKS, lambda: b"state")
        return share.agreed_repairs("auditing", {})

    with ThreadPoolExecutor(RANKS + 1) as pool:
        pool.submit(beat)
        try:
            assert list(pool.map(pipe, range(RANKS))) == [{}] * RANKS
        finally:
            over.set()
