"""What an audit along one path cannot do is refused in one line, and what it can is done once."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

import ampaudit
from ampaudit.core.errors import AuditError, RunFailed, TraceFailed
from ampaudit.run import runner
from ampaudit.trace.path import recorder

X = torch.linspace(-1, 1, 32).reshape(4, 8)


class Branch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        if x.sum() > 0:  # DECIDED
            x = x * 2
        return x


class Endless(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        while x.abs().max() > 0:
            x = x * 0.5 + 1
        return x


class WritesArray(Branch):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.inner(x)
        x.detach().numpy()[0] = 0
        return x * 1


def test_a_path_that_does_not_end_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recorder, "MAX_OPS", 300)
    with pytest.raises(TraceFailed, match="more than 300 ops") as raised:
        ampaudit.scan(Endless(), X)
    assert "test_path_limits.py:" in str(raised.value)


@pytest.mark.parametrize("way", ["convert", "stress", "static"])
def test_what_needs_a_graph_for_all_inputs_names_the_line(way: str, tmp_path: Path) -> None:
    calls: dict[str, Any] = {
        "convert": lambda: ampaudit.convert(Branch().eval(), X, tmp_path / "out"),
        "stress": lambda: ampaudit.scan(Branch(), X, stress=1),
        "static": lambda: ampaudit.scan(Branch(), X, static=True),
    }
    with pytest.raises(AuditError, match="depend") as raised:
        calls[way]()
    line = next(n for n, text in enumerate(Path(__file__).read_text().splitlines(), 1) if "# DECIDED" in text)
    assert f"test_path_limits.py:{line}" in str(raised.value)
    assert not list(tmp_path.iterdir())


def test_a_write_to_an_array_is_not_passed_over() -> None:
    with pytest.raises(RunFailed, match="does not give the outputs of the model itself"):
        ampaudit.scan(WritesArray(), X)


def test_proofs_say_that_they_are_about_this_path() -> None:
    proofs = ampaudit.scan(Branch(), X, prove=True).proofs
    assert proofs is not None
    assert "decides as on these inputs" in proofs.contract


def test_each_path_is_traced_once(monkeypatch: pytest.MonkeyPatch) -> None:
    traced: list[Any] = []
    own = runner.trace

    def counted(*args: Any, **kwargs: Any) -> Any:
        traced.append(own(*args, **kwargs))
        return traced[-1]

    monkeypatch.setattr(runner, "trace", counted)
    batches = [X, X * 1.1, -X, X * 0.9, -X * 2]
    ways = {bool(Branch().inner(x).sum() > 0) for x in batches}
    report = ampaudit.scan(Branch(), batches=batches, policy="half")
    assert ways == {True, False}
    assert len(traced) == 2
    assert report.path is not None
    assert report.path.count == 2
    assert [line.reads for line in report.path.lines] == [len(batches)]


def test_a_packed_sequence_is_an_input() -> None:
    class Tagger(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            torch.manual_seed(0)
            self.rnn = nn.GRU(8, 8, batch_first=True)

        def forward(self, packed: Any) -> torch.Tensor:
            return pad_packed_sequence(self.rnn(packed)[0], batch_first=True)[0]

    packed = pack_padded_sequence(X[None].repeat(3, 1, 1), torch.tensor([4, 2, 1]), batch_first=True)
    kept: list[Any] = []
    model = Tagger()
    report = ampaudit.scan(
        model,
        (packed,),
        policy="half",
        session=ampaudit.Session(keep_outputs=lambda _, found: kept.extend(found.values())),
    )
    assert report.exit_code == 0
    torch.testing.assert_close(kept[0][0], model(packed), rtol=1e-5, atol=1e-6)
