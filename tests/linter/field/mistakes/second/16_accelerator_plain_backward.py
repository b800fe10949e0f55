"""
# source: https://github.com/lucidrains/med-seg-diff-pytorch/pull/6
# mistake: loss.backward() is called instead of accelerator.backward(loss), so under fp16 the loss is not scaled and the prepared optimizer's scaler has nothing to unscale.
# severity: error
# torch: any (accelerate)
"""
import argparse
import os

import torch
from accelerate import Accelerator
from torch.optim import AdamW
from tqdm import tqdm

from diffusion_unet import MedSegDiff, Unet
from lesions import SkinLesions


def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--learning_rate", type=float, default=1e-4)
    parser.add_argument("--epochs", type=int, default=1000)
    parser.add_argument("--batch_size", type=int, default=8)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=4)
    parser.add_argument("--save_every", type=int, default=100)
    parser.add_argument("--output_dir", default="output")
    return parser.parse_args()


def main():
    args = parse_args()
    os.makedirs(args.output_dir, exist_ok=True)
    accelerator = Accelerator(
        mixed_precision="fp16", gradient_accumulation_steps=args.gradient_accumulation_steps, log_with="wandb"
    )
    if accelerator.is_main_process:
        accelerator.init_trackers("med-seg-diff", config=vars(args))

    model = Unet(dim=64, image_size=128, mask_channels=1, input_img_channels=3, dim_mults=(1, 2, 4, 8))
    diffusion = MedSegDiff(model, timesteps=1000).to(accelerator.device)
    loader = torch.utils.data.DataLoader(SkinLesions("data"), batch_size=args.batch_size, shuffle=True)
    optimizer = AdamW(model.parameters(), lr=args.learning_rate, betas=(0.95, 0.999), weight_decay=1e-6)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)

    for epoch in range(args.epochs):
        running = 0.0
        for img, mask in tqdm(loader, disable=not accelerator.is_local_main_process):
            with accelerator.accumulate(model):
                loss = diffusion(mask, img)
                accelerator.log({"loss": loss.detach().item()})
                loss.backward()  # <- here
                optimizer.step()
                optimizer.zero_grad()
            running += loss.item()
        accelerator.print(f"epoch {epoch}: {running / len(loader):.4f}")
        if epoch % args.save_every == 0 and accelerator.is_main_process:
            torch.save(accelerator.unwrap_model(model).state_dict(), f"{args.output_dir}/{epoch}.pt")


if __name__ == "__main__":
    main()
