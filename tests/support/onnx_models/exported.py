"""Models in plain torch code, exported to ONNX: BERT, GPT-2, ResNet-18 with squeeze-excite, a T5 encoder."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.support.onnx_models.case import Arrays, Size


class Attention(nn.Module):
    """Eager attention; ``mask`` is added to the scores."""

    def __init__(self, width: int, heads: int, *, bias: bool = True, scaled: bool = True) -> None:
        super().__init__()
        self.heads, self.scale = heads, (width // heads) ** -0.5 if scaled else None
        for name in ("query", "key", "value", "out"):
            setattr(self, name, nn.Linear(width, width, bias=bias))

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        batch, length, _ = x.shape
        query, key, value = (
            linear(x).view(batch, length, self.heads, -1).transpose(1, 2)
            for linear in (self.query, self.key, self.value)
        )
        scores = query @ key.transpose(2, 3)
        if self.scale is not None:
            scores = scores * self.scale
        weights = torch.softmax(scores + mask, -1)
        return self.out((weights @ value).transpose(1, 2).reshape(batch, length, -1))


class BertLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention, self.attention_norm = Attention(width, heads), nn.LayerNorm(width, 1e-12)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width, 1e-12)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = self.attention_norm(x + self.attention(x, mask))
        return self.norm(x + self.down(F.gelu(self.up(x))))


class Bert(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words, self.types = nn.Embedding(vocabulary, width), nn.Embedding(2, width)
        self.positions = nn.Embedding(512, width)
        self.norm = nn.LayerNorm(width, 1e-12)
        self.layers = nn.ModuleList(BertLayer(width, heads) for _ in range(layers))
        self.pooler = nn.Linear(width, width)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> tuple[Tensor, Tensor]:
        positions = self.positions(torch.arange(input_ids.shape[1]))
        x = self.norm(self.words(input_ids) + self.types(torch.zeros_like(input_ids)) + positions)
        dropped = 1.0 - attention_mask[:, None, None, :].to(x.dtype)
        mask = dropped * torch.finfo(x.dtype).min
        for layer in self.layers:
            x = layer(x, mask)
        return x, torch.tanh(self.pooler(x[:, 0]))


class GptLayer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm_1, self.attention = nn.LayerNorm(width), Attention(width, heads)
        self.norm_2, self.up, self.down = (
            nn.LayerNorm(width),
            nn.Linear(width, 4 * width),
            nn.Linear(4 * width, width),
        )

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.norm_1(x), mask)
        hidden = self.up(self.norm_2(x))
        inner = 0.7978845608 * (hidden + 0.044715 * torch.pow(hidden, 3.0))
        return x + self.down(0.5 * hidden * (1.0 + torch.tanh(inner)))


class Gpt(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(1024, width)
        self.layers = nn.ModuleList(GptLayer(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocabulary, bias=False)
        self.head.weight = self.words.weight

    def forward(self, input_ids: Tensor) -> Tensor:
        length = input_ids.shape[1]
        x = self.words(input_ids) + self.positions(torch.arange(length))
        lowest = torch.full((length, length), torch.finfo(x.dtype).min)
        mask = torch.triu(lowest, diagonal=1)
        for layer in self.layers:
            x = layer(x, mask)
        return self.head(self.norm(x))


class ResidualBlock(nn.Module):
    def __init__(self, inner: int, outer: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inner, outer, 3, stride, 1, bias=False)
        self.conv_2 = nn.Conv2d(outer, outer, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(outer), nn.BatchNorm2d(outer)
        self.squeeze, self.excite = nn.Conv2d(outer, outer // 4, 1), nn.Conv2d(outer // 4, outer, 1)
        short = [nn.Conv2d(inner, outer, 1, stride, bias=False), nn.BatchNorm2d(outer)]
        self.short = nn.Sequential(*short) if stride > 1 or inner != outer else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm_2(self.conv_2(F.relu(self.norm_1(self.conv_1(x)))))
        pooled = y.mean((2, 3), keepdim=True)
        return F.relu(y * torch.sigmoid(self.excite(F.relu(self.squeeze(pooled)))) + self.short(x))


class ResNet(nn.Module):
    def __init__(self, width: int, blocks: tuple[int, ...]) -> None:
        super().__init__()
        self.stem, self.norm = nn.Conv2d(3, width, 7, 2, 3, bias=False), nn.BatchNorm2d(width)
        made, inner = [], width
        for stage, count in enumerate(blocks):
            for index in range(count):
                made.append(ResidualBlock(inner, width * 2**stage, 2 if stage > 0 and index == 0 else 1))
                inner = width * 2**stage
        self.blocks, self.head = nn.Sequential(*made), nn.Linear(inner, 1000)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm(self.stem(image))), 3, 2, 1)
        return self.head(self.blocks(x).mean((2, 3)))


class RmsNorm(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))

    def forward(self, x: Tensor) -> Tensor:
        variance = x.pow(2).mean(-1, keepdim=True)
        return self.weight * (x * torch.rsqrt(variance + 1e-6))


class T5Layer(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.attention_norm = RmsNorm(width)
        self.attention = Attention(width, heads, bias=False, scaled=False)
        self.norm = RmsNorm(width)
        self.wi = nn.Linear(width, 4 * width, bias=False)
        self.wo = nn.Linear(4 * width, width, bias=False)

    def forward(self, x: Tensor, mask: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), mask)
        return x + self.wo(F.relu(self.wi(self.norm(x))))


class T5(nn.Module):
    def __init__(self, vocabulary: int, width: int, heads: int, layers: int) -> None:
        super().__init__()
        self.words, self.bias = nn.Embedding(vocabulary, width), nn.Embedding(32, heads)
        self.layers = nn.ModuleList(T5Layer(width, heads) for _ in range(layers))
        self.norm = RmsNorm(width)

    def forward(self, input_ids: Tensor) -> Tensor:
        places = torch.arange(input_ids.shape[1])
        distance = (places[None] - places[:, None]).clamp(-16, 15) + 16
        bias = self.bias(distance).permute(2, 0, 1)[None]
        x = self.words(input_ids)
        for layer in self.layers:
            x = layer(x, bias)
        return self.norm(x)


def bert(folder: Path, size: Size) -> tuple[Path, Arrays]:
    """BERT-base, whose padding mask is finfo.min; its first output is read inside, by the pooler."""
    settings = (30522, 768, 12, 12) if size == "full" else (60, 32, 2, 2)
    torch.manual_seed(0)
    model = rescaled(Bert(*settings), 0.02)
    return exported(model, tokens(settings[0], size), folder, ["hidden", "pooled"], dynamic=size == "full")


def gpt2(folder: Path, size: Size) -> tuple[Path, Arrays]:
    """GPT-2 small; its embedding is the head's weight."""
    settings = (50257, 768, 12, 12) if size == "full" else (60, 32, 2, 2)
    torch.manual_seed(1)
    model = rescaled(Gpt(*settings), 0.02)
    ids = tokens(settings[0], size)["input_ids"]
    return exported(model, {"input_ids": ids}, folder, ["logits"], dynamic=size == "full")


def resnet(folder: Path, size: Size) -> tuple[Path, Arrays]:
    """ResNet-18 with a squeeze-and-excitation gate in each block."""
    width, blocks, side = (64, (2, 2, 2, 2), 224) if size == "full" else (8, (1, 1), 32)
    torch.manual_seed(2)
    model = ResNet(width, blocks)
    image = torch.randn(1, 3, side, side)
    for _ in range(3):  # running statistics
        with torch.no_grad():
            model.train()(torch.randn(4, 3, side, side))
    return exported(model, {"image": image}, folder, ["logits"])


def t5(folder: Path, size: Size) -> tuple[Path, Arrays]:
    """A T5 encoder of six layers; its feed-forward weights drive the residual stream to about 1.7e5."""
    settings = (8192, 512, 8, 6) if size == "full" else (60, 32, 2, 2)
    torch.manual_seed(3)
    model = T5(*settings)
    with torch.no_grad():
        for layer, gain in zip(model.layers, FEED_FORWARD_GAINS[size], strict=True):
            layer.attention.query.weight.mul_(0.2)
            layer.wi.weight.mul_(gain**0.5)
            layer.wo.weight.mul_(gain**0.5)
    ids = tokens(settings[0], size)["input_ids"]
    return exported(model, {"input_ids": ids}, folder, ["hidden"])


# small residuals, residuals whose squares overflow, and residuals that overflow themselves
FEED_FORWARD_GAINS = {"full": (1.0, 1.0, 1e4, 1.4e5, 5.5e4, 5.5e4), "small": (1e4, 2e5)}


def rescaled(model: nn.Module, deviation: float) -> nn.Module:
    """Draw weights as BERT and GPT-2 do."""
    for module in model.modules():
        if isinstance(module, nn.Linear | nn.Embedding):
            nn.init.normal_(module.weight, std=deviation)
    return model


def tokens(vocabulary: int, size: Size) -> dict[str, Tensor]:
    """Two samples; the second is padded."""
    length = 128 if size == "full" else 12
    mask = torch.ones(2, length, dtype=torch.long)
    mask[1, length // 2 :] = 0
    return {"input_ids": torch.randint(0, vocabulary, (2, length)), "attention_mask": mask}


def exported(
    model: nn.Module, inputs: dict[str, Tensor], folder: Path, outputs: list[str], *, dynamic: bool = False
) -> tuple[Path, Arrays]:
    path = folder / "model.onnx"
    options: dict[str, Any] = {"dynamo": True, "verbose": False, "optimize": True, "output_names": outputs}
    if dynamic:
        options["dynamic_shapes"] = {name: {0: "batch", 1: "sequence"} for name in inputs}
    disabled = logging.root.manager.disable
    logging.disable(logging.WARNING)  # of torchvision, which is not installed
    try:
        with torch.no_grad(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            program = torch.onnx.export(model.eval(), (), kwargs=inputs, **options)
    finally:
        logging.disable(disabled)
    assert program is not None
    program.save(path, external_data=False)
    return path, {name: tensor.numpy() for name, tensor in inputs.items()}
