# source: Lightning-AI/pytorch-lightning issue #4524 https://github.com/Lightning-AI/pytorch-lightning/issues/4524
# mistake: until the critic starts its optimizer has no gradients, yet the scaler steps it every batch: "No inf checks were recorded for this optimizer"
# severity: error
from types import SimpleNamespace

import torch
import torch.nn as nn
import torch.nn.functional as F

cfg = SimpleNamespace(lr=1e-4, critic_from=20_000, steps=400_000, codebook=1024, dim=64, adv=0.1)


class Codec(nn.Module):
    def __init__(self):
        super().__init__()
        self.enc = nn.Sequential(nn.Conv2d(3, 128, 4, 2, 1), nn.SiLU(), nn.Conv2d(128, cfg.dim, 4, 2, 1))
        self.codes = nn.Embedding(cfg.codebook, cfg.dim)
        self.dec = nn.Sequential(
            nn.ConvTranspose2d(cfg.dim, 128, 4, 2, 1), nn.SiLU(), nn.ConvTranspose2d(128, 3, 4, 2, 1)
        )

    def forward(self, x):
        z = self.enc(x)
        flat = z.float().permute(0, 2, 3, 1)
        idx = torch.cdist(flat.flatten(0, 2)[None], self.codes.weight[None])[0].argmin(-1)
        q = self.codes(idx).view_as(flat)
        commit = F.mse_loss(flat, q.detach()) * 0.25 + F.mse_loss(q, flat.detach())
        q = flat + (q - flat).detach()
        return self.dec(q.permute(0, 3, 1, 2)), commit


def patch_critic():
    return nn.Sequential(
        nn.Conv2d(3, 64, 4, 2, 1), nn.LeakyReLU(0.2), nn.Conv2d(64, 128, 4, 2, 1), nn.LeakyReLU(0.2),
        nn.Conv2d(128, 1, 4, 1, 1),
    )


def main(images):
    codec, critic = Codec().cuda(), patch_critic().cuda()
    opt_c = torch.optim.Adam(codec.parameters(), cfg.lr, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(critic.parameters(), cfg.lr, betas=(0.5, 0.9))
    scaler = torch.amp.GradScaler("cuda")
    for step, x in zip(range(cfg.steps), images):
        x = x.cuda()
        playing = step >= cfg.critic_from

        critic.requires_grad_(False)
        opt_c.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            rec, commit = codec(x)
            loss = F.l1_loss(rec, x) + commit
            if playing:
                loss = loss - cfg.adv * critic(rec).mean()
        scaler.scale(loss).backward()
        scaler.step(opt_c)

        critic.requires_grad_(True)
        opt_d.zero_grad()
        if playing:  # <- here
            with torch.autocast("cuda", dtype=torch.float16):
                hinge = F.relu(1 - critic(x)).mean() + F.relu(1 + critic(rec.detach())).mean()
            scaler.scale(hinge).backward()
        scaler.step(opt_d)  # <- here
        scaler.update()
        if step % 500 == 0:
            print(step, loss.item())


if __name__ == "__main__":
    from photos import endless

    main(endless(size=128, batch=32))
