"""The search for inputs that overflow: it finds planted ones, saves them, and never breaks what is proved."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from ampaudit import scan
from ampaudit.core.errors import InputError, UsageError, WeightsError
from ampaudit.core.source_config import SourceConfig
from ampaudit.report.model import Report
from ampaudit.source.open import open_source
from tests.support.wrap import Wrap
from tests.support.zoo import ZOO

MODEL = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.inner.weight.copy_(torch.eye(8) * 1000 + 900)

    def forward(self, x):
        return self.inner(x) * 12

def example_inputs():
    return torch.tensor([[1.0, -1.0] * 4])
"""


def stressed(path: Path, place: Path, options: SourceConfig | None = None, stress: int = 30) -> Report:
    source = open_source(str(path), options or SourceConfig())
    return scan(
        source, policy="half", dtype="float16", assume=["input=-1:1"], stress=stress, stress_dir=str(place)
    )


def test_an_input_that_overflows_is_found_saved_and_overflows_again(model_file, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    """On the example half of the terms cancel; in the corner of the domain none do."""
    path = model_file(MODEL)
    report = stressed(path, tmp_path / "found")
    assert report.verdict == "pass"
    broken = [s for s in report.stressed if s.overflows]
    assert [s.site for s in broken] == ["(top)/mul"]
    assert broken[0].reached == pytest.approx(12 * 8200)
    assert broken[0].file is not None
    again = stressed(path, tmp_path, SourceConfig(inputs=Path(broken[0].file)), stress=0)
    assert [f.site for f in again.findings if f.severity == "error"] == ["(top)/mul"]
    assert "overflow-_top_mul.safetensors" in broken[0].file


def test_an_op_that_breaks_where_fp32_is_small_is_found(tmp_path: Path) -> None:
    """An input of a million is infinite in float16, and a norm makes NaN of it."""
    options = {"policy": "half", "assume": ["input=-1e6:1e6"], "stress": 6, "stress_dir": str(tmp_path)}
    (norm,) = scan(nn.LayerNorm(8).eval(), torch.linspace(0, 1, 8)[None], **options).stressed
    assert norm.reached < 8
    assert norm.overflows


def test_a_search_without_a_site_says_so(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()).eval()
    report = scan(model, torch.ones(2, 4), policy="half", assume=["input=-1:1"], prove=True, stress=5)
    assert report.proofs is not None
    assert report.proofs.proved == report.proofs.sites
    assert [note for note in report.notes if note.startswith("--stress searched nothing")]


@pytest.mark.parametrize(("assumed", "count"), [("input=-1:1", 1), ("input=-1:60000", 0)])
def test_a_report_says_if_its_inputs_are_outside_the_assumed_ranges(assumed: str, count: int) -> None:
    model = nn.Linear(4, 4).eval()
    report = scan(model, torch.full((2, 4), 6e4), policy="half", assume=[assumed], prove=True)
    assert [note.partition(":")[0] for note in report.notes].count("the run checks no proof") == count


class Masked(nn.Module):
    def forward(self, x: torch.Tensor, mask: torch.Tensor | None = None) -> torch.Tensor:
        return x * 2 if mask is None else x * 2 * mask


def test_calls_with_other_inputs_share_the_ranges_of_a_proof() -> None:
    """The first call has no mask, and the second larger values."""
    calls = [{"x": torch.ones(3)}, {"x": torch.full((3,), 4.0), "mask": torch.full((3,), 7.0)}]
    report = scan(Masked(), batches=calls, policy="half", prove=True, assume=["mask=0:9"])
    assert report.proofs is not None
    assert {a.name: (a.low, a.high) for a in report.proofs.assumed} == {"x": (1, 4), "mask": (0, 9)}
    assert not report.notes
    with pytest.raises(UsageError, match="--assume maks"):
        scan(Masked(), batches=calls, policy="half", prove=True, assume=["maks=0:9"])


class Bags(nn.Module):
    """Takes offsets, which have to begin at 0."""

    def __init__(self) -> None:
        super().__init__()
        self.bag = nn.EmbeddingBag(10, 8)

    def forward(self, ids: torch.Tensor, offsets: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        return self.bag(ids, offsets) * x


def test_integers_that_an_op_refuses_are_passed_over(tmp_path: Path) -> None:
    inputs = torch.arange(8), torch.tensor([0, 3]), torch.ones(8)
    report = scan(Bags().eval(), inputs, policy="half", stress=10, stress_dir=tmp_path)
    assert {site.site for site in report.stressed} <= {"bag/embedding_bag", "(top)/mul"}
    assert report.stressed


@pytest.mark.parametrize("name", ["bert", "gpt2", "vit"])
@pytest.mark.parametrize("policy", ["half", "torch-cuda"])
def test_no_proved_site_is_ever_broken(name: str, policy: str, tmp_path: Path) -> None:
    """Every input that the search visits is run in full, and every proved site stays finite."""
    zoo = ZOO[name]()
    model = zoo.model.eval()
    report = scan(model, zoo.kwargs, policy=policy, prove=True, stress=12, stress_dir=str(tmp_path))
    proved = {site.site for site in report.sites if site.verdict == "proved"}
    assert report.proofs is not None
    assert len(proved) >= 0.7 * report.proofs.sites
    assert not proved & {s.site for s in report.stressed if s.overflows}
    bounds = {site.site: site.bound for site in report.sites if site.verdict == "proved"}
    peaks = {site.site: site.forward.peak for site in report.sites if site.forward is not None}
    assert all(peaks[site] <= bound for site, bound in bounds.items() if site in peaks and bound is not None)


def test_the_search_is_the_same_each_time(model_file, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = model_file(MODEL)
    first, second = (stressed(path, tmp_path / str(i)).stressed for i in range(2))
    assert [(s.site, s.reached) for s in first] == [(s.site, s.reached) for s in second]


class Tokens(nn.Module):
    """One row of the table is large; a search that only draws ids at random would need luck."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.up = nn.Embedding(5000, 8), nn.Linear(8, 8, bias=False)
        with torch.no_grad():
            self.table.weight[4321] = 60.0
            self.up.weight.copy_(torch.eye(8) * 2000)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.up(self.table(ids))


def test_token_ids_are_searched_through_their_embedding(tmp_path: Path) -> None:
    ids = torch.randint(0, 4000, (2, 4))
    report = scan(Tokens().eval(), ids, policy="half", stress=9, stress_dir=tmp_path)
    (found,) = [s for s in report.stressed if s.overflows]
    assert found.site == "up/linear"
    assert found.reached == pytest.approx(120_000)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [({"x": torch.zeros(1)}, "holds x"), ({"input[0]": torch.zeros(1, 8).half()}, "float16")],
)
def test_a_file_with_other_tensors_is_refused(model_file, tmp_path: Path, tensors, message) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "inputs.safetensors"
    save_file(tensors, path)
    with pytest.raises(InputError, match=message):
        open_source(str(model_file(MODEL)), SourceConfig(inputs=path))


def test_a_file_that_is_no_safetensors_is_refused(model_file, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    path = tmp_path / "inputs.safetensors"
    path.write_bytes(b"\x00" * 20)
    with pytest.raises(WeightsError, match="not a valid safetensors file"):
        open_source(str(model_file(MODEL)), SourceConfig(inputs=path))
    with pytest.raises(InputError, match="No such file"):
        open_source(str(model_file(MODEL)), SourceConfig(inputs=tmp_path / "none.safetensors"))


def test_a_write_through_a_view_reaches_the_ops_after_it(tmp_path: Path) -> None:
    def forward(m: nn.Module, x: torch.Tensor) -> torch.Tensor:
        y = m.a(x) * 1
        y[0].mul_(1e5)
        return y * 2

    model = Wrap(forward, a=nn.Identity())
    options = {"policy": "half", "assume": ["input=0:1"], "stress": 6, "stress_dir": str(tmp_path)}
    found = {s.site: s.reached for s in scan(model, torch.full((2, 4), 0.1), **options).stressed}
    assert found["(top)/mul#2"] == pytest.approx(float(model(torch.ones(2, 4)).amax()))
