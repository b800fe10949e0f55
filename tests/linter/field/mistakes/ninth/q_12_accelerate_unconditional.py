# source: https://github.com/harubaru/waifu-diffusion/issues/64
# mistake: torch's clip_grad_norm_ is used under Accelerate with fp16, so it clips gradients that are still multiplied by the loss scale
# severity: error
import argparse

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_scheduler


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--resolution", type=int, default=64)
    p.add_argument("--epochs", type=int, default=100)
    p.add_argument("--lr", type=float, default=1e-4)
    p.add_argument("--accum", type=int, default=2)
    p.add_argument("--max-norm", type=float, default=1.0)
    p.add_argument("--seed", type=int, default=0)
    return p.parse_args()


def main(dataset):
    args = parse()
    set_seed(args.seed)
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=args.accum)

    model = UNet2DModel(sample_size=args.resolution, in_channels=3, out_channels=3,
                        block_out_channels=(128, 128, 256, 256),
                        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
                        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"))
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=1e-6)
    loader = torch.utils.data.DataLoader(dataset, batch_size=16, shuffle=True, num_workers=4)
    lr_scheduler = get_scheduler("cosine", optimizer, num_warmup_steps=500 * accelerator.num_processes,
                                 num_training_steps=len(loader) * args.epochs // args.accum)
    model, optimizer, loader, lr_scheduler = accelerator.prepare(model, optimizer, loader, lr_scheduler)

    for epoch in range(args.epochs):
        model.train()
        for batch in loader:
            clean = batch["pixels"]
            noise = torch.randn_like(clean)
            t = torch.randint(0, 1000, (clean.shape[0],), device=clean.device).long()
            noisy = noise_scheduler.add_noise(clean, noise, t)
            with accelerator.accumulate(model):
                pred = model(noisy, t).sample
                loss = F.mse_loss(pred.float(), noise.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    torch.nn.utils.clip_grad_norm_(model.parameters(), args.max_norm)  # <- here
                optimizer.step()
                lr_scheduler.step()
                optimizer.zero_grad()
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f}")

    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        accelerator.unwrap_model(model).save_pretrained("ddpm")
