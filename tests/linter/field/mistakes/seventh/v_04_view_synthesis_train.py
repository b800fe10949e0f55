# source: Haian-Jin/LVSM PR #19 https://github.com/Haian-Jin/LVSM/pull/19
# mistake: on a too-large norm the loop skips step and update after unscale_, so the next unscale_ raises RuntimeError
# severity: error
from dataclasses import dataclass

import torch
import torch.nn as nn
import torch.nn.functional as F


@dataclass
class Opts:
    lr: float = 4e-4
    warm: int = 2500
    soft_norm: float = 2.0
    hard_norm: float = 5.0
    log_every: int = 50


class RayTransformer(nn.Module):
    def __init__(self, d=256, layers=6):
        super().__init__()
        self.inp = nn.Linear(9, d)
        blk = nn.TransformerEncoderLayer(d, 8, 4 * d, batch_first=True, norm_first=True, dropout=0.0)
        self.core = nn.TransformerEncoder(blk, layers)
        self.rgb = nn.Linear(d, 3)

    def forward(self, rays):
        return self.rgb(self.core(self.inp(rays)))


def train(batches, o: Opts):
    net = RayTransformer().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=o.lr, betas=(0.9, 0.95))
    ramp = torch.optim.lr_scheduler.LambdaLR(opt, lambda i: min(1.0, (i + 1) / o.warm))
    scaler = torch.amp.GradScaler("cuda")
    updates = 0
    for i, (rays, rgb) in enumerate(batches):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            pred = net(rays.cuda())
            loss = F.mse_loss(pred.float(), rgb.cuda())
        scaler.scale(loss).backward()

        scaler.unscale_(opt)  # <- here
        norm = nn.utils.clip_grad_norm_(net.parameters(), o.soft_norm)
        if norm.item() > o.hard_norm:  # <- here
            print(f"[{i}] norm {norm.item():.2f} above {o.hard_norm}, dropping this batch")
            continue  # <- here
        scaler.step(opt)
        scaler.update()  # <- here
        ramp.step()
        updates += 1
        if updates % o.log_every == 0:
            psnr = -10 * torch.log10(loss.detach())
            print(f"[{i}] updates={updates} psnr={psnr.item():.2f}")
    return net


if __name__ == "__main__":
    from scenes import stream_batches

    train(stream_batches("data/scenes", batch=16), Opts())
