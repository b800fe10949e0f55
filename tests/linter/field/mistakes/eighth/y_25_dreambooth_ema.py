# source: https://github.com/d8ahazard/sd_dreambooth_extension/pull/1415
# mistake: the EMA copy is kept in float16, where the update (1e-4 of a difference) is rounded away, so the average hardly ever moves.
# severity: warning
import argparse
import copy

import torch
import torch.nn.functional as F
from diffusers import AutoencoderKL, DDPMScheduler, UNet2DConditionModel
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader
from transformers import CLIPTextModel, CLIPTokenizer

from concept import ConceptImages


class EMAModel:
    def __init__(self, model, decay=0.9999, dtype=torch.float16):  # <- here
        self.decay = decay
        self.model = copy.deepcopy(model).to(dtype).eval()  # <- here
        self.model.requires_grad_(False)
        self.count = 0

    @torch.no_grad()
    def step(self, model):
        self.count += 1
        decay = min(self.decay, (1 + self.count) / (10 + self.count))
        for avg, cur in zip(self.model.parameters(), model.parameters()):
            avg.mul_(decay).add_(cur.to(avg.dtype), alpha=1 - decay)  # <- here
        for avg, cur in zip(self.model.buffers(), model.buffers()):
            avg.copy_(cur)


def main(a):
    device = torch.device("cuda")
    tok = CLIPTokenizer.from_pretrained(a.base, subfolder="tokenizer")
    text = CLIPTextModel.from_pretrained(a.base, subfolder="text_encoder", torch_dtype=torch.float16).to(device)
    vae = AutoencoderKL.from_pretrained(a.base, subfolder="vae").to(device)
    text.requires_grad_(False).eval()
    vae.requires_grad_(False).eval()
    unet = UNet2DConditionModel.from_pretrained(a.base, subfolder="unet").to(device)
    unet.enable_gradient_checkpointing()
    noise_plan = DDPMScheduler.from_pretrained(a.base, subfolder="scheduler")

    loader = DataLoader(ConceptImages(a.images, a.prompt, tok), a.batch, shuffle=True, drop_last=True)
    optimizer = torch.optim.AdamW(unet.parameters(), lr=a.lr, weight_decay=1e-2)
    scaler = GradScaler()
    ema = EMAModel(unet)  # <- here

    unet.train()
    done = 0
    while done < a.steps:
        for pixels, ids in loader:
            with torch.no_grad():
                latent = vae.encode(pixels.to(device)).latent_dist.sample() * 0.18215
                context = text(ids.to(device))[0]
            noise = torch.randn_like(latent)
            t = torch.randint(0, noise_plan.config.num_train_timesteps, (len(latent),), device=device)
            noisy = noise_plan.add_noise(latent, noise, t)
            with autocast():
                pred = unet(noisy, t, context).sample
            loss = F.mse_loss(pred.float(), noise)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            ema.step(unet)
            done += 1
            if done % 25 == 0:
                print(f"{done}/{a.steps} loss {loss.item():.4f}")
            if done >= a.steps:
                break
    ema.model.save_pretrained(a.out)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--base", default="runwayml/stable-diffusion-v1-5")
    p.add_argument("--images", required=True)
    p.add_argument("--prompt", default="a photo of sks dog")
    p.add_argument("--out", default="unet_ema")
    p.add_argument("--batch", type=int, default=2)
    p.add_argument("--steps", type=int, default=2000)
    p.add_argument("--lr", type=float, default=2e-6)
    main(p.parse_args())
