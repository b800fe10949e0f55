import argparse
import copy
import os

import torch
import torch.nn.functional as F
from accelerate import Accelerator
from datasets import load_dataset
from diffusers import DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from torch.utils.data import DataLoader
from torchvision import transforms


class ShadowModel:
    def __init__(self, model, decay=0.9999):
        self.model = copy.deepcopy(model).float().eval().requires_grad_(False)
        self.decay, self.steps = decay, 0

    @torch.no_grad()
    def step(self, model):
        self.steps += 1
        d = min(self.decay, (1 + self.steps) / (10 + self.steps))
        for s, p in zip(self.model.parameters(), model.parameters()):
            s.lerp_(p.to(s.dtype), 1 - d)
        for s, b in zip(self.model.buffers(), model.buffers()):
            s.copy_(b)

    def state_dict(self):
        return {"model": self.model.state_dict(), "steps": self.steps}

    def load_state_dict(self, state):
        self.model.load_state_dict(state["model"])
        self.steps = state["steps"]


def parse():
    ap = argparse.ArgumentParser()
    ap.add_argument("--dataset", default="huggan/flowers-102-categories")
    ap.add_argument("--out", default="out/ddpm-flowers")
    ap.add_argument("--resolution", type=int, default=64)
    ap.add_argument("--batch", type=int, default=16)
    ap.add_argument("--accum", type=int, default=4)
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--epochs", type=int, default=100)
    ap.add_argument("--resume", default=None, help="folder written by save_state")
    return ap.parse_args()


def main():
    args = parse()
    accelerator = Accelerator(mixed_precision="fp16", gradient_accumulation_steps=args.accum, log_with=None)
    tf = transforms.Compose(
        [
            transforms.Resize(args.resolution),
            transforms.CenterCrop(args.resolution),
            transforms.RandomHorizontalFlip(),
            transforms.ToTensor(),
            transforms.Normalize([0.5], [0.5]),
        ]
    )
    dataset = load_dataset(args.dataset, split="train")
    dataset.set_transform(lambda ex: {"x": [tf(im.convert("RGB")) for im in ex["image"]]})
    loader = DataLoader(dataset, args.batch, shuffle=True, num_workers=4)

    unet = UNet2DModel(sample_size=args.resolution, block_out_channels=(128, 256, 256, 512))
    ema = ShadowModel(unet)
    ema.model.to(accelerator.device)
    schedule = DDPMScheduler(num_train_timesteps=1000, prediction_type="v_prediction")
    optimizer = torch.optim.AdamW(unet.parameters(), lr=args.lr, betas=(0.95, 0.999), eps=1e-8)
    updates = args.epochs * len(loader) // args.accum
    lr_sched = get_cosine_schedule_with_warmup(optimizer, 500, updates)
    unet, optimizer, loader, lr_sched = accelerator.prepare(unet, optimizer, loader, lr_sched)
    accelerator.register_for_checkpointing(ema)
    first = 0
    if args.resume:
        accelerator.load_state(args.resume)
        first = int(os.path.basename(args.resume.rstrip("/"))) + 1

    for epoch in range(first, args.epochs):
        unet.train()
        for batch in loader:
            x = batch["x"]
            noise = torch.randn_like(x)
            t = torch.randint(0, schedule.config.num_train_timesteps, (x.size(0),), device=x.device)
            noisy, target = schedule.add_noise(x, noise, t), schedule.get_velocity(x, noise, t)
            with accelerator.accumulate(unet):
                pred = unet(noisy, t).sample
                loss = F.mse_loss(pred.float(), target.float())
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(unet.parameters(), 1.0)
                optimizer.step()
                lr_sched.step()
                optimizer.zero_grad()
            if accelerator.sync_gradients:
                ema.step(accelerator.unwrap_model(unet))
        accelerator.print(f"epoch {epoch} loss {loss.item():.4f} lr {lr_sched.get_last_lr()[0]:.2e}")
        accelerator.save_state(os.path.join(args.out, f"{epoch:04d}"))

    if accelerator.is_main_process:
        ema.model.half().save_pretrained(os.path.join(args.out, "final"))


if __name__ == "__main__":
    main()
