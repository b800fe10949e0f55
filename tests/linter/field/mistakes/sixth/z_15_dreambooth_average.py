# source: d8ahazard/sd_dreambooth_extension PR #1415
# mistake: the running average is kept in bfloat16; a change of 0.0001 of the difference is rounded away, so the averaged weights practically never move
# severity: warning
import copy
import random
from dataclasses import dataclass

import torch
import torch.nn.functional as F


@dataclass
class Opts:
    lr: float = 1e-5
    decay: float = 0.9999
    steps: int = 20_000
    weight_dtype: torch.dtype = torch.bfloat16
    drop_caption: float = 0.1


class AveragedUNet:
    def __init__(self, unet, decay, dtype):
        self.decay = decay
        self.net = copy.deepcopy(unet).to(dtype).requires_grad_(False).eval()  # <- here

    @torch.no_grad()
    def absorb(self, unet):
        for avg, cur in zip(self.net.parameters(), unet.parameters()):
            avg.mul_(self.decay).add_(cur.to(avg.dtype), alpha=1.0 - self.decay)  # <- here
        for avg, cur in zip(self.net.buffers(), unet.buffers()):
            avg.copy_(cur)


def v_target(noise_scheduler, latents, noise, t):
    if noise_scheduler.config.prediction_type == "v_prediction":
        return noise_scheduler.get_velocity(latents, noise, t)
    return noise


def personalise(unet, vae, text_encoder, noise_scheduler, loader, opts: Opts):
    vae.to("cuda", opts.weight_dtype).requires_grad_(False)
    text_encoder.to("cuda", opts.weight_dtype).requires_grad_(False)
    unet.to("cuda", torch.float32).train()
    averaged = AveragedUNet(unet, opts.decay, opts.weight_dtype)  # <- here
    optimizer = torch.optim.AdamW(unet.parameters(), lr=opts.lr, weight_decay=1e-2)

    done = 0
    while done < opts.steps:
        for pixels, captions, null in loader:
            with torch.no_grad():
                latents = vae.encode(pixels.to("cuda", opts.weight_dtype)).latent_dist.sample()
                latents = latents.float() * vae.config.scaling_factor
                ids = null if random.random() < opts.drop_caption else captions
                cond = text_encoder(ids.cuda())[0]
            noise = torch.randn_like(latents)
            t = torch.randint(0, noise_scheduler.config.num_train_timesteps, (len(latents),), device="cuda")
            noisy = noise_scheduler.add_noise(latents, noise, t)
            with torch.autocast("cuda", dtype=opts.weight_dtype):
                pred = unet(noisy, t, cond).sample
            loss = F.mse_loss(pred.float(), v_target(noise_scheduler, latents, noise, t))
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(unet.parameters(), 1.0)
            optimizer.step()
            averaged.absorb(unet)
            done += 1
            if done >= opts.steps:
                break
    averaged.net.save_pretrained("unet_ema")
    return averaged.net
