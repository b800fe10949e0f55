"""Samples an image with a tiny diffusers pipeline of random weights.

ampaudit record --module pipe.unet -o steps/ examples/recording/diffusion.py --steps 20
ampaudit scan examples/recording/diffusion.py:tiny_unet --inputs steps/
"""

from __future__ import annotations

import argparse

import torch
from diffusers import DDIMPipeline, DDIMScheduler, UNet2DModel


def tiny_unet() -> UNet2DModel:
    torch.manual_seed(0)
    return UNet2DModel(
        sample_size=8,
        layers_per_block=1,
        block_out_channels=(8, 16),
        down_block_types=("DownBlock2D", "AttnDownBlock2D"),
        up_block_types=("AttnUpBlock2D", "UpBlock2D"),
        attention_head_dim=4,
        norm_num_groups=4,
    ).eval()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=20)
    steps = parser.parse_args().steps
    pipe = DDIMPipeline(tiny_unet(), DDIMScheduler())
    pipe.set_progress_bar_config(disable=True)
    image = pipe(generator=torch.Generator().manual_seed(0), num_inference_steps=steps, output_type="np")
    print(image.images.shape, image.images.mean())


if __name__ == "__main__":
    main()
