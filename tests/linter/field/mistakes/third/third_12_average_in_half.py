import argparse

import torch
import torch.nn.functional as F
from diffusers import DDPMScheduler, UNet2DModel
from torch.utils.data import DataLoader
from torchvision import datasets, transforms
from torchvision.utils import save_image


class EMA:
    def __init__(self, model, decay=0.9999):
        self.decay = decay
        self.shadow = {k: v.detach().half() for k, v in model.state_dict().items()}  # <- here

    @torch.no_grad()
    def update(self, model):
        for k, v in model.state_dict().items():
            if v.dtype.is_floating_point:
                self.shadow[k].mul_(self.decay).add_(v, alpha=1 - self.decay)
            else:
                self.shadow[k].copy_(v)

    def copy_to(self, model):
        model.load_state_dict(self.shadow)


def build_unet(size):
    return UNet2DModel(
        sample_size=size, in_channels=3, out_channels=3, layers_per_block=2,
        block_out_channels=(128, 128, 256, 256),
        down_block_types=("DownBlock2D", "DownBlock2D", "AttnDownBlock2D", "DownBlock2D"),
        up_block_types=("UpBlock2D", "AttnUpBlock2D", "UpBlock2D", "UpBlock2D"),
    )


@torch.no_grad()
def sample(model, noise_scheduler, n, size):
    model.eval()
    x = torch.randn(n, 3, size, size, device="cuda")
    for t in noise_scheduler.timesteps:
        with torch.autocast("cuda", dtype=torch.float16):
            eps = model(x, t).sample
        x = noise_scheduler.step(eps.float(), t, x).prev_sample
    return (x.clamp(-1, 1) + 1) / 2


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--size", type=int, default=64)
    parser.add_argument("--epochs", type=int, default=200)
    parser.add_argument("--lr", type=float, default=1e-4)
    args = parser.parse_args()
    tf = transforms.Compose([
        transforms.Resize(args.size), transforms.CenterCrop(args.size), transforms.ToTensor(),
        transforms.Normalize([0.5] * 3, [0.5] * 3),
    ])
    loader = DataLoader(datasets.ImageFolder("/data/flowers", tf), 64, shuffle=True, num_workers=8, drop_last=True)
    model = build_unet(args.size).cuda()
    ema = EMA(model)
    ema_model = build_unet(args.size).cuda()
    noise_scheduler = DDPMScheduler(num_train_timesteps=1000)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(args.epochs):
        model.train()
        for x, _ in loader:
            x = x.cuda(non_blocking=True)
            noise = torch.randn_like(x)
            t = torch.randint(0, 1000, (x.size(0),), device=x.device)
            noisy = noise_scheduler.add_noise(x, noise, t)
            with torch.autocast("cuda", dtype=torch.float16):
                pred = model(noisy, t).sample
            loss = F.mse_loss(pred.float(), noise)
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            ema.update(model)
        print(f"epoch {epoch} loss {loss.item():.5f}")
        if epoch % 10 == 0:
            ema.copy_to(ema_model)
            noise_scheduler.set_timesteps(1000)
            save_image(sample(ema_model, noise_scheduler, 16, args.size), f"samples_{epoch}.png", nrow=4)


if __name__ == "__main__":
    main()
