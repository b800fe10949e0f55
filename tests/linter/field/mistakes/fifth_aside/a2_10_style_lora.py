# source: https://github.com/huggingface/diffusers/issues/6442
# mistake: the adapters that are trained are cast to float16 along with the frozen network, so the GradScaler meets float16 gradients (ValueError: Attempting to unscale FP16 gradients)
# severity: error
import argparse

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch import nn
from transformers import CLIPTextModel

BASE = "runwayml/stable-diffusion-v1-5"


class LowRank(nn.Module):
    def __init__(self, base: nn.Linear, rank: int):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)
        nn.init.normal_(self.down.weight, std=1 / rank)
        nn.init.zeros_(self.up.weight)

    def forward(self, x, *unused):
        return self.base(x) + self.up(self.down(x))


def inject(unet, rank):
    fresh = []
    for module in list(unet.modules()):
        for name in ("to_q", "to_k", "to_v"):
            lin = getattr(module, name, None)
            if isinstance(lin, nn.Linear):
                wrapped = LowRank(lin, rank)
                setattr(module, name, wrapped)
                fresh += [*wrapped.down.parameters(), *wrapped.up.parameters()]
    return fresh


def main(loader):
    ap = argparse.ArgumentParser()
    ap.add_argument("--rank", type=int, default=8)
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--steps", type=int, default=1500)
    args = ap.parse_args()

    noise_sched = DDPMScheduler.from_pretrained(BASE, subfolder="scheduler")
    vae = AutoencoderKL.from_pretrained(BASE, subfolder="vae").requires_grad_(False)
    text = CLIPTextModel.from_pretrained(BASE, subfolder="text_encoder").requires_grad_(False)
    unet = UNet2DConditionModel.from_pretrained(BASE, subfolder="unet").requires_grad_(False)
    adapters = inject(unet, args.rank)
    for net in (vae, text, unet):
        net.to("cuda", dtype=torch.float16)  # <- here

    opt = torch.optim.AdamW(adapters, lr=args.lr, weight_decay=1e-2)  # <- here
    scaler = torch.cuda.amp.GradScaler()  # <- here
    step = 0
    while step < args.steps:
        for batch in loader:
            with torch.no_grad():
                z = vae.encode(batch["pixels"].to("cuda", torch.float16)).latent_dist.sample()
                z = z * vae.config.scaling_factor
                ctx = text(batch["ids"].to("cuda"))[0]
            eps = torch.randn_like(z)
            t = torch.randint(0, noise_sched.config.num_train_timesteps, (len(z),), device="cuda")
            with torch.autocast("cuda", dtype=torch.float16):
                guess = unet(noise_sched.add_noise(z, eps, t), t, ctx).sample
            loss = F.mse_loss(guess.float(), eps.float())
            opt.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)  # <- here
            nn.utils.clip_grad_norm_(adapters, 1.0)
            scaler.step(opt)
            scaler.update()
            step += 1
            if step >= args.steps:
                break
    torch.save({n: p for n, p in unet.state_dict().items() if ".down." in n or ".up." in n}, "lora.pt")
