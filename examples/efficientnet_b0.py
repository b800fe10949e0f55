"""tf_efficientnet_b0 with one output, images of 384 x 512, BCE-with-logits and SGD: what 16 bits buy.

A well-known comparison of FP32 with autocast and GradScaler on two cards found less memory on both, and less
time on one only. Here it is in one command:

    ampaudit bench examples/efficientnet_b0.py --train --batch-size 32 --modes fp32,tf32,autocast,converted

Needs timm (pip install timm, which brings torchvision); without it the same architecture comes from
Transformers, with random weights in both cases. AMPAUDIT_IMAGE=128x96 takes smaller images, for a CPU.

Expect: memory falls in 16 bits on every card; time falls where tensor cores are several times faster than
float32 (V100, A100, H100), and may not where they are not (RTX 3090, GTX 10).
"""

from __future__ import annotations

import os

import torch
from torch import nn

SAMPLES = 32


def image_size() -> tuple[int, int]:
    height, _, width = os.environ.get("AMPAUDIT_IMAGE", "384x512").partition("x")
    return int(height), int(width)


class Logits(nn.Module):
    """Transformers' model returns an object; timm's, and this one, the logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return self.model(pixel_values=images).logits


def get_model() -> nn.Module:
    torch.manual_seed(0)
    try:
        import timm
    except ImportError:
        from transformers import EfficientNetConfig, EfficientNetForImageClassification

        # the coefficients of B0; Transformers' defaults are those of B7
        config = EfficientNetConfig(
            width_coefficient=1.0, depth_coefficient=1.0, hidden_dim=1280, dropout_rate=0.2, num_labels=1
        )
        return Logits(EfficientNetForImageClassification(config))
    return timm.create_model("tf_efficientnet_b0", pretrained=False, num_classes=1)


def batches():
    generator = torch.Generator().manual_seed(0)
    while True:
        images = torch.randn(SAMPLES, 3, *image_size(), generator=generator)
        yield images, torch.randint(0, 2, (SAMPLES, 1), generator=generator).float()


def model_inputs(batch):
    return batch[0]


def loss(output, batch):
    return nn.functional.binary_cross_entropy_with_logits(output.float(), batch[1])


def optimizer(params):
    return torch.optim.SGD(params, lr=1e-3, momentum=0.9)
