# source: https://github.com/harubaru/waifu-diffusion/issues/64
# mistake: with Accelerate's fp16 the norm is clipped with torch.nn.utils and not accelerator.clip_grad_norm_, so the clip sees gradients multiplied by the loss scale
# severity: error
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup


def arguments():
    ap = argparse.ArgumentParser()
    ap.add_argument("--tensors", required=True, help="file with normalised precipitation fields")
    ap.add_argument("--size", type=int, default=64)
    ap.add_argument("--batch", type=int, default=32)
    ap.add_argument("--epochs", type=int, default=80)
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--max-norm", type=float, default=1.0)
    ap.add_argument("--seed", type=int, default=7)
    ap.add_argument("--out", default="rain-unet")
    return ap.parse_args()


def unet(size):
    return UNet2DModel(
        sample_size=size, in_channels=1, out_channels=1, layers_per_block=2, block_out_channels=(64, 128, 256, 256),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )


def main():
    args = arguments()
    accelerator = Accelerator(mixed_precision="fp16")
    set_seed(args.seed)

    fields = torch.load(args.tensors)
    loader = torch.utils.data.DataLoader(fields, args.batch, shuffle=True, drop_last=True)
    net = unet(args.size)
    noise_plan = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(net.parameters(), lr=args.lr)
    lr_plan = get_cosine_schedule_with_warmup(optimizer, 500, args.epochs * len(loader))
    net, optimizer, loader, lr_plan = accelerator.prepare(net, optimizer, loader, lr_plan)

    for epoch in range(args.epochs):
        net.train()
        for clean in loader:
            noise = torch.randn_like(clean)
            t = torch.randint(0, noise_plan.config.num_train_timesteps, (clean.shape[0],), device=clean.device)
            noisy = noise_plan.add_noise(clean, noise, t)
            guess = net(noisy, t).sample
            loss = F.mse_loss(guess.float(), noise)
            accelerator.backward(loss)
            torch.nn.utils.clip_grad_norm_(net.parameters(), args.max_norm)  # <- here
            optimizer.step()
            lr_plan.step()
            optimizer.zero_grad()
        accelerator.print(f"epoch {epoch}: {loss.item():.5f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(net).save_pretrained(args.out)


if __name__ == "__main__":
    main()
