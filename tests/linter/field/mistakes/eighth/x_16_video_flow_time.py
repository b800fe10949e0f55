# source: modelscope/DiffSynth-Studio PR #1025
# mistake: the time in [0, 1000) is cast to bfloat16 before the sinusoidal embedding, where neighbouring times are up to 4 apart
# severity: warning
import copy
import math
from pathlib import Path

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.nn.parallel import DistributedDataParallel

from flowvid.dit import VideoTransformer
from flowvid.latents import latent_loader

HALF = torch.bfloat16


def sinusoid(dim, position):
    rate = torch.pow(10000, -torch.arange(dim // 2, device=position.device, dtype=torch.float64) / (dim // 2))
    arg = torch.outer(position.to(torch.float64), rate)
    return torch.cat([arg.cos(), arg.sin()], dim=1).to(position.dtype)


class TimedModel(nn.Module):
    def __init__(self, width=1536, freq=256, **kw):
        super().__init__()
        self.freq = freq
        self.body = VideoTransformer(width=width, **kw)
        self.time_mlp = nn.Sequential(nn.Linear(freq, width), nn.SiLU(), nn.Linear(width, width))

    def forward(self, latents, time, text):
        return self.body(latents, self.time_mlp(sinusoid(self.freq, time)), text)


def shifted(u, shift=5.0):
    return shift * u / (1 + (shift - 1) * u)


def flow_loss(model, latents, text):
    sigma = shifted(torch.rand(latents.size(0), device=latents.device))
    time = (sigma * 1000).to(HALF)  # <- here
    noise = torch.randn_like(latents)
    s = sigma.view(-1, 1, 1, 1, 1)
    mixed = (1 - s) * latents + s * noise
    with torch.autocast("cuda", dtype=HALF):
        velocity = model(mixed, time, text)  # <- here
    return mse_loss(velocity.float(), noise - latents)


@torch.no_grad()
def average(avg, model, decay):
    for a, p in zip(avg.parameters(), model.parameters()):
        a.lerp_(p, 1 - decay)


def main(out="runs/flow"):
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    torch.cuda.set_device(rank % torch.cuda.device_count())
    model = TimedModel(depth=30, heads=12).cuda()
    avg = copy.deepcopy(model).requires_grad_(False)
    ddp = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(ddp.parameters(), lr=1e-5, weight_decay=1e-2)
    loader = latent_loader(rank, dist.get_world_size(), batch=1)
    for step, (latents, text) in enumerate(loader):
        loss = flow_loss(ddp, latents.cuda().float(), text.cuda())
        loss.backward()
        norm = nn.utils.clip_grad_norm_(ddp.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        average(avg, model, 0.999)
        if rank == 0 and step % 20 == 0:
            print(step, loss.item(), norm.item(), math.log10(loss.item() + 1e-9))
        if rank == 0 and step % 2000 == 0:
            Path(out).mkdir(parents=True, exist_ok=True)
            torch.save(avg.state_dict(), f"{out}/{step:07d}.pt")


if __name__ == "__main__":
    main()
