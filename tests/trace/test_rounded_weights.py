"""``storage: rounded``: weights are stored in 16 bits, and the model's code sees them in float32."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import nn

import ampaudit


class Reads(nn.Module):
    """Asks for the dtype of a weight; reads weights as they are, as a view, and updates a buffer."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner = nn.Linear(8, 8)
        self.scale = nn.Parameter(torch.rand(8, 8))
        self.register_buffer("seen", torch.zeros(8))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        assert self.inner.weight.dtype is torch.float32
        self.seen.add_(x.mean(0))
        return self.inner(x) @ self.scale.t()[:, :4] + self.seen[:4]


def policy_in(folder: Path, rules: str) -> str:
    path = folder / "policy.yaml"
    path.write_text(f"name: mine\ntitle: mine\nextends: [16-bit]\n{rules}")
    return str(path)


FLOAT32 = """rules:
- {id: all, match: {layer: ['*']}, cast: float32, reason: precision, why: test, source: test}
"""


def rounded(model: nn.Module) -> nn.Module:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(parameter.half().float())
    return model


def test_float32_ops_compute_with_the_rounded_weights(tmp_path: Path) -> None:
    x, kept = torch.randn(5, 8), {}
    policy = policy_in(tmp_path, FLOAT32)
    report = ampaudit.scan(
        Reads().eval(), x, policy=policy, session=ampaudit.Session(keep_outputs=kept.__setitem__)
    )
    assert not report.low_precision_sites or all("cast" in s.site for s in report.low_precision_sites)
    exact, lower = kept[0]["output"]
    assert torch.equal(exact, Reads()(x))
    assert torch.equal(lower, rounded(Reads())(x))
    assert not torch.equal(exact, lower)


def test_16_bit_ops_compute_as_with_weights_cast_by_autocast(tmp_path: Path) -> None:
    x, kept = torch.randn(5, 8), {}
    keep = "weights: {storage: float32, outputs: float32, keep_fp32_modules: ignore}\n"
    for number, policy in enumerate(("16-bit", policy_in(tmp_path, keep))):
        ampaudit.scan(
            Reads().eval(),
            x,
            policy=policy,
            session=ampaudit.Session(keep_outputs=lambda _, found, n=number: kept.update({n: found})),
        )
    assert torch.equal(kept[0]["output"][1], kept[1]["output"][1])


def test_convert_stores_them_in_16_bits(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 4)).eval()
    keep = 'weights: {storage: rounded, outputs: float32, keep: [{parameter: ["2.bias"]}]}\n'
    policy = policy_in(tmp_path, keep + FLOAT32)
    directory = tmp_path / "out"
    report, made = ampaudit.convert(model, torch.randn(5, 8), directory, policy=policy)
    assert made is not None, report.findings
    stored = {name: tensor.dtype for name, tensor in load_file(directory / "model.safetensors").items()}
    assert stored.pop("2.bias") is torch.float32
    assert set(stored.values()) == {torch.float16}
    assert ampaudit.verify(directory).exit_code == 0


class Tied(nn.Module):
    """An embedding whose weight is the head's as well, and larger than all else."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.table, self.inner = nn.Embedding(300, 16), nn.Linear(16, 16)
        self.head = nn.Linear(16, 300, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.inner(self.table(ids))))


def test_a_tied_weight_is_stored_in_16_bits_once(tmp_path: Path) -> None:
    model, ids = Tied().eval(), torch.arange(12).view(2, 6)
    ampaudit.convert(model, ids, tmp_path / "out", policy="16-bit", program=False)
    stored = load_file(tmp_path / "out" / "model.safetensors")
    assert {tensor.dtype for tensor in stored.values()} == {torch.float16}
    assert sum(tensor.numel() for tensor in stored.values()) == 300 * 16 + 16 * 16 + 16
    report = ampaudit.tune(model, ids, min_sqnr=50.0)
    assert report.bytes_after == 2 * (300 * 16 + 16 * 16 + 16)
