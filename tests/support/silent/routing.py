"""Decisions that flip: routing, ranks, thresholds, codes."""

from __future__ import annotations

import torch
from torch import nn

from tests.support.silent.case import Built, Net, silent


def _offset(inner: int, outer: int, shift: float) -> nn.Linear:
    """A layer whose outputs differ by little from a large common value."""
    layer = nn.Linear(inner, outer)
    with torch.no_grad():
        layer.bias.fill_(shift)
    return layer


@silent("half", "bfloat16", "AMP209")
def router_ties(bad: bool) -> Built:
    """The scores of the experts lie within one step of bfloat16, so that the first of them wins."""
    experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(8))

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        scores = m.gate(x)  # culprit
        chosen = scores.topk(1, -1).indices.squeeze(-1)
        every = torch.stack([expert(x) for expert in m.experts], 1)
        return every[torch.arange(x.shape[0]), chosen]

    return Net(forward, gate=_offset(32, 8, 300.0 if bad else 0.0), experts=experts), (
        torch.randn(64, 32) * 4,
    )


@silent("half", "float16", "AMP209")
def argmax_decoding(bad: bool) -> Built:
    """The logits have a large offset that softmax would not see, and argmax should not."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        return m.head(x).argmax(-1)  # culprit

    head = _offset(32, 200, 4000.0 if bad else 0.0)
    with torch.no_grad():
        head.weight.mul_(20.0)
    return Net(forward, head=head), (torch.randn(64, 32),)


@silent("half", "bfloat16", "AMP209")
def ranks_of_scores(bad: bool) -> Built:
    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        scores = m.score(x).squeeze(-1)  # culprit
        return scores.argsort(dim=-1)

    score = nn.Linear(1, 1)
    with torch.no_grad():
        score.weight.fill_(1.0)
        score.bias.fill_(100.0 if bad else 0.0)
    return Net(forward, score=score), (torch.randperm(64).view(1, 64, 1) / 32.0 - 1,)


@silent("half", "bfloat16", "AMP209")
def threshold_on_a_sum(bad: bool) -> Built:
    """A gate opens at a threshold that the values are all near to."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        level = m.level(x)  # culprit
        return torch.where(level > (500.0 if bad else 0.0), x[..., :8], torch.zeros_like(x[..., :8]))

    return Net(forward, level=_offset(32, 8, 500.0 if bad else 0.0)), (torch.randn(64, 32),)


@silent("half", "bfloat16", "AMP209")
def quantised_codes(bad: bool) -> Built:
    """Codes of 12 bits do not fit the 8 bits of bfloat16."""

    def forward(m: Net, x: torch.Tensor) -> torch.Tensor:
        scaled = (x if bad else x.float()) * 2000  # culprit
        codes = torch.round(scaled)  # culprit
        return m.table(codes.long().clamp(0, 2000))

    return Net(forward, table=nn.Embedding(2001, 8)), (torch.randint(0, 128, (64,)) / 128.0,)


@silent("half", "bfloat16", "AMP209 AMP206 AMP207")
def token_ids_in_bfloat16(bad: bool) -> Built:
    """Ids above 256 are rounded on their way to the embedding."""

    def forward(m: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        carried = ids.to(x.dtype if bad else torch.float32)  # culprit
        return m.table(carried.long()) + x

    inputs = torch.randint(300, 1000, (4, 16)), torch.randn(4, 16, 8)
    return Net(forward, table=nn.Embedding(1024, 8)), inputs


@silent("half", "float16", "AMP209 AMP206")
def pixel_indices(bad: bool) -> Built:
    """Row times width plus column, computed in float16, which counts in ones up to 2,048."""

    def forward(m: Net, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
        rows, columns = (rows.half(), columns.half()) if bad else (rows, columns)
        flat = rows * 200 + columns  # culprit
        return m.image(flat.long().clamp(0, 39_999))

    inputs = torch.randint(0, 200, (64,)), torch.randint(0, 200, (64,))
    return Net(forward, image=nn.Embedding(40_000, 4)), inputs


@silent("half", "bfloat16", "AMP209 AMP206")
def time_buckets(bad: bool) -> Built:
    def forward(m: Net, seconds: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        since = seconds.to(x.dtype if bad else torch.float32)  # culprit
        return m.table(torch.bucketize(since, torch.arange(0.0, 2000.0, 2.0))) + x

    return Net(forward, table=nn.Embedding(1001, 8)), (torch.arange(401, 1801, 20), torch.zeros(8))


@silent("half", "bfloat16", "AMP209")
def packed_codes(bad: bool) -> Built:
    """Two indices in one number, taken apart again: with parts of it in FP32 they may leave their tables."""

    def forward(m: Net, high: torch.Tensor, low: torch.Tensor) -> torch.Tensor:
        if not bad:
            high, low = high.long(), low.long()
        code = high * 64 + low  # culprit
        row = torch.div(code, 64, rounding_mode="floor")
        return m.rows(row.long()) + m.columns((code - row * 64).long())

    tables = {"rows": nn.Embedding(96, 8), "columns": nn.Embedding(64, 8)}
    inputs = torch.randint(70, 96, (4, 9)).float(), torch.randint(0, 64, (4, 9)).float()
    return Net(forward, **tables), inputs


@silent("half", "bfloat16", "AMP209")
def positions_times_a_mask(bad: bool) -> Built:
    """Several ops in a row hold the same positions, and each would round them by itself."""

    def forward(m: Net, ids: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        mask = ids.ne(1).to(x.dtype if bad else torch.int64)
        running = torch.cumsum(mask, dim=1)  # culprit
        return m.table((running * mask).long() + 1) + x

    return Net(forward, table=nn.Embedding(700, 8)), (torch.randint(2, 50, (1, 600)), torch.zeros(8))


@silent("half", "bfloat16", "AMP209")
def saturated_router(bad: bool) -> Built:
    """Sigmoids of large scores are 1; the mask that is filled in afterwards rounds the same values again."""

    def forward(m: Net, x: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        logits = m.gate(x)
        scores = logits.sigmoid() if bad else logits  # culprit
        masked = scores.masked_fill(~allowed, -100.0)
        return m.experts(masked.argmax(-1))

    model = Net(forward, gate=_offset(16, 8, 7.5 if bad else 0.0), experts=nn.Embedding(8, 16))
    allowed = torch.ones(64, 8, dtype=torch.bool)
    allowed[:, 6:] = False
    return model, (torch.randn(64, 16) * 4, allowed)
