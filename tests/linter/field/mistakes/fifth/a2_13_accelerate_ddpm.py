# source: https://github.com/harubaru/waifu-diffusion/issues/64
# mistake: with Accelerate's fp16 the gradients are still scaled after accelerator.backward, and torch's clip_grad_norm_ (not accelerator.clip_grad_norm_) clips them in that state
# severity: error
import math
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from accelerate.utils import set_seed
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader

CFG = dict(
    size=128,
    batch=16,
    epochs=50,
    lr=1e-4,
    warmup=500,
    max_grad_norm=1.0,
    precision="fp16",
    out="ddpm-flowers",
)


def make_unet(size):
    return UNet2DModel(
        sample_size=size,
        in_channels=3,
        out_channels=3,
        layers_per_block=2,
        block_out_channels=(128, 128, 256, 256, 512, 512),
        down_block_types=("DownBlock2D",) * 4 + ("AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D") + ("UpBlock2D",) * 4,
    )


def main(dataset, cfg=CFG):
    set_seed(7)
    accelerator = Accelerator(mixed_precision=cfg["precision"], log_with="tensorboard",
                              project_dir=os.path.join(cfg["out"], "logs"))
    loader = DataLoader(dataset, batch_size=cfg["batch"], shuffle=True, num_workers=4)
    unet = make_unet(cfg["size"])
    schedule = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=cfg["lr"])
    lr_schedule = get_cosine_schedule_with_warmup(
        optimizer, cfg["warmup"], math.ceil(len(loader)) * cfg["epochs"])
    unet, optimizer, loader, lr_schedule = accelerator.prepare(unet, optimizer, loader, lr_schedule)
    accelerator.init_trackers("ddpm")

    seen = 0
    for epoch in range(cfg["epochs"]):
        unet.train()
        for batch in loader:
            clean = batch["image"]
            noise = torch.randn_like(clean)
            t = torch.randint(0, 1000, (clean.shape[0],), device=clean.device)
            noisy = schedule.add_noise(clean, noise, t)

            pred = unet(noisy, t, return_dict=False)[0]
            loss = F.mse_loss(pred.float(), noise.float())
            accelerator.backward(loss)  # <- here
            clip_grad_norm_(unet.parameters(), cfg["max_grad_norm"])  # <- here
            optimizer.step()
            lr_schedule.step()
            optimizer.zero_grad()

            seen += 1
            accelerator.log({"loss": loss.detach().item(), "lr": lr_schedule.get_last_lr()[0]}, step=seen)
        accelerator.save_state(os.path.join(cfg["out"], f"epoch_{epoch}"))
    accelerator.end_training()
