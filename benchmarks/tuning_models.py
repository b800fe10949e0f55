"""Models for `benchmarks.tuning`: two that are trained here in under a minute, MiniLM, and a BERT-base.

Trained weights are cached in `dist/`, under a name that changes with this file.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCABULARY, START = 32, 1
CACHE = Path(__file__).resolve().parents[1] / "dist" / "trained"


@dataclass(frozen=True)
class TuningModel:
    """A model with the inputs of a call, and how often it is right on what it was trained for."""

    model: nn.Module
    inputs: dict[str, Tensor]
    trained: str = "no"


class Reverser(nn.Module):
    """A small T5 that reads a sequence and writes it backwards."""

    def __init__(self) -> None:
        super().__init__()
        from transformers import T5Config, T5ForConditionalGeneration

        config = T5Config(
            vocab_size=VOCABULARY,
            d_model=64,
            d_kv=16,
            d_ff=128,
            num_layers=3,
            num_heads=4,
            dropout_rate=0.0,
            decoder_start_token_id=START,
            use_cache=False,
        )
        self.t5 = T5ForConditionalGeneration(config)

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor) -> Tensor:
        logits: Tensor = self.t5(input_ids=input_ids, decoder_input_ids=decoder_input_ids).logits
        return logits


class Block(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, out, 3, stride, 1, bias=False)
        self.conv2 = nn.Conv2d(out, out, 3, 1, 1, bias=False)
        self.norm1, self.norm2 = nn.BatchNorm2d(out), nn.BatchNorm2d(out)
        same = channels == out and stride == 1
        self.short = nn.Identity() if same else nn.Conv2d(channels, out, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm2(self.conv2(F.relu(self.norm1(self.conv1(x)))))
        return F.relu(h + self.short(x))


class Classifier(nn.Module):
    """A residual network of 13 convolutions for 10 kinds of stripes."""

    def __init__(self) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16)
        shapes = ((16, 16, 1), (16, 32, 2), (32, 32, 1), (32, 64, 2), (64, 64, 1))
        self.blocks = nn.Sequential(*(Block(*shape) for shape in shapes))
        self.head = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        x: Tensor = self.head(self.blocks(F.relu(self.norm(self.stem(images)))).mean((2, 3)))
        return x


def sequences(count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Draw sequences in which no word repeats, so that the previous word tells the decoder its place."""
    words = torch.rand(count, VOCABULARY - 2).argsort(1)[:, :10] + 2
    backwards = words.flip(1)
    begun = torch.cat([torch.full((count, 1), START), backwards[:, :-1]], 1)
    return {"input_ids": words, "decoder_input_ids": begun}, backwards


def stripes(count: int) -> tuple[dict[str, Tensor], Tensor]:
    """Draw stripes at one of five angles, coarse or fine, in random colors with noise."""
    kinds = torch.randint(10, (count,))
    angle, waves = (kinds % 5) * torch.pi / 5, 3.0 + 3.0 * (kinds // 5)
    x, y = torch.meshgrid(torch.linspace(-1, 1, 24), torch.linspace(-1, 1, 24), indexing="ij")
    place = torch.cos(angle)[:, None, None] * x + torch.sin(angle)[:, None, None] * y
    phase = torch.rand(count, 1, 1) * 6.28
    waved = torch.sin(place * waves[:, None, None] * torch.pi + phase)
    images = waved[:, None] * (0.5 + torch.rand(count, 3, 1, 1))
    return {"images": images + torch.randn(count, 3, 24, 24)}, kinds


Draw = Callable[[int], tuple[dict[str, Tensor], Tensor]]


def train(model: nn.Module, draw: Draw, steps: int, batch: int, rate: float) -> TuningModel:
    """Train a model, or load it from the cache, and measure how often it is right on new data."""
    code = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    file = CACHE / f"{type(model).__name__.lower()}-{code}.pt"
    if file.exists():
        model.load_state_dict(torch.load(file, weights_only=True))
    else:
        optimizer = torch.optim.AdamW(model.parameters(), rate)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, steps)
        for _ in range(steps):
            inputs, labels = draw(batch)
            loss = F.cross_entropy(model.train()(**inputs).flatten(0, -2), labels.flatten())
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        CACHE.mkdir(parents=True, exist_ok=True)
        torch.save(model.state_dict(), file)
    torch.manual_seed(1)
    inputs, labels = draw(256)
    with torch.no_grad():
        right = (model.eval()(**inputs).argmax(-1) == labels).float().mean().item()
    torch.manual_seed(2)
    return TuningModel(model.eval(), draw(16)[0], f"{100 * right:.1f} % right")


def t5() -> TuningModel:
    return train(Reverser(), sequences, 1000, 64, 3e-3)


def cnn() -> TuningModel:
    return train(Classifier(), stripes, 250, 32, 1e-2)


def minilm() -> TuningModel:
    from examples import sentence_encoder

    return TuningModel(sentence_encoder.get_model().eval(), next(sentence_encoder.batches()), "as published")


def bert() -> TuningModel:
    from transformers import BertConfig, BertModel

    model = BertModel(BertConfig(), add_pooling_layer=False).eval()
    words = torch.randint(1000, 30000, (2, 64))
    return TuningModel(model, {"input_ids": words, "attention_mask": torch.ones_like(words)})


def tiny() -> TuningModel:
    """Return a model of two layers, for a smoke run."""
    layers = nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.Linear(16, 16))
    return TuningModel(layers.eval(), {"input": torch.randn(8, 16)})


MODELS: dict[str, Callable[[], TuningModel]] = {
    "bert": bert,
    "t5": t5,
    "cnn": cnn,
    "minilm": minilm,
    "tiny": tiny,
}


def build(name: str) -> TuningModel:
    """Build a model under a fixed seed."""
    torch.manual_seed(0)
    return MODELS[name]()
