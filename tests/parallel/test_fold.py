"""Joining records gives the same for every division of the batches, in whatever order their parts come."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory

from hypothesis import given
from hypothesis import strategies as st
from pydantic import TypeAdapter

from ampaudit.audit.config import ScanConfig
from ampaudit.audit.scan import scan_policies
from ampaudit.core.session import Progress, Session
from ampaudit.core.sites import SiteId
from ampaudit.core.source_config import SourceConfig
from ampaudit.findings.finding import Gap, GapKind
from ampaudit.parallel.identity import identity_of
from ampaudit.parallel.parts import FilePart, read_parts, records_from_json, records_of_rank, records_to_json
from ampaudit.policy import load_policy
from ampaudit.run.record import RunRecord
from ampaudit.run.share import PartDone, PartRecords, join_parts
from ampaudit.source.open import open_source
from tests.support.parallel import BATCHES, written


class Keeping(FilePart):
    """A part whose records are there for a comparison with those of its file."""

    kept: dict[int, list[RunRecord]]

    def joined(self, phase: str, own: PartRecords, progress: Progress) -> list[RunRecord]:
        self.kept = own.records
        return super().joined(phase, own, progress)


@cache
def whole() -> dict[int, list[RunRecord]]:
    """Return the records of all batches, as a file of one part has them."""
    with TemporaryDirectory() as folder:
        path = written(Path(folder))
        source = open_source(str(path), SourceConfig(batches=BATCHES, train=True))
        policies, config = [load_policy("half")], ScanConfig(backward=True)
        share = Keeping(0, 1, [])
        share.describe(str(path), identity_of(source, policies, config))
        try:
            scan_policies(source, policies, config, Session(share=share))
        except PartDone:
            share.save(Path(folder) / "part.json", force=False)
        (file,) = read_parts([Path(folder) / "part.json"])
        made = share.kept
        assert {number: file.records() for number in file.part.batches} == made
        return made


def again() -> dict[int, list[RunRecord]]:
    """Return the same, in objects of its own."""
    return {
        number: records_from_json(records_to_json(records), "part") for number, records in whole().items()
    }


def test_records_are_the_same_after_a_journey() -> None:
    assert again() == whole()
    sent = {
        number: records_of_rank(records_to_json(records), "rank 1") for number, records in whole().items()
    }
    assert sent == whole()
    assert len(whole()) == BATCHES
    assert any(record.origins for records in whole().values() for record in records)
    assert all("backward" in record.parts for records in whole().values() for record in records)


@given(
    owners=st.lists(st.integers(0, 4), min_size=BATCHES, max_size=BATCHES),
    order=st.permutations(range(5)),
)
def test_every_division_gives_the_same(owners: list[int], order: list[int]) -> None:
    one = join_parts([PartRecords(again())])
    records = again()
    parts = [
        PartRecords({n: records[n] for n, owner in enumerate(owners) if owner == part}) for part in order
    ]
    assert join_parts(parts) == one
    assert one[0].batches == BATCHES


@given(cut=st.integers(1, BATCHES - 1))
def test_sums_of_counts_do_not_depend_on_where_a_run_is_cut(cut: int) -> None:
    """Counts, extremes and sets are joined in any grouping; sums of squares only in order."""
    records = again()
    first = join_parts([PartRecords({n: records[n] for n in range(cut)})])[0]
    last = join_parts([PartRecords({n: records[n] for n in range(cut, BATCHES)})])[0]
    first.join(last)
    (one,) = join_parts([PartRecords(again())])
    for site, seen in one.observations.items():
        joined = first.observations[site]
        for name in ("elements", "batches", "ref_peak", "peak", "pos_inf", "nan", "batch_peaks", "samples"):
            assert getattr(joined, name) == getattr(seen, name), (site, name)
    assert (first.masks, first.gaps, first.decisions) == (one.masks, one.gaps, one.decisions)
    assert [origin.site for origin in first.origins] == [origin.site for origin in one.origins]


def test_a_batch_peak_keeps_its_number() -> None:
    (one,) = join_parts([PartRecords(again())])
    assert set(one.observations[SiteId("down/linear")].batch_peaks) == set(range(BATCHES))


def test_a_record_is_the_same_file_in_any_process() -> None:
    names = [SiteId(f"layer.{number:02}/relu") for number in range(20)]
    gaps = {Gap(name, GapKind.OPAQUE, "op", "unknown") for name in names}
    record = RunRecord("cpu", "emulated", masks=set(names), by_design=set(names), gaps=gaps)
    stored = json.loads(TypeAdapter(RunRecord).dump_json(record))
    assert stored["masks"] == stored["by_design"] == [gap["site"] for gap in stored["gaps"]] == names
