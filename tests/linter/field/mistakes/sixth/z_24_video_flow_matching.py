# source: modelscope/DiffSynth-Studio PR #1025 (issue #562)
# mistake: time steps in 0..1000 are cast to bfloat16 before the sinusoidal embedding, where the spacing is 4 above 512: the embedding gets the wrong time
# severity: warning
import math
import os

import lightning as L
import torch
from torch import nn
from torch.utils.data import DataLoader


def sinusoid(dim, position):
    half = dim // 2
    freq = torch.exp(-math.log(10_000) * torch.arange(half, device=position.device, dtype=torch.float32) / half)
    arg = position[:, None] * freq[None]
    return torch.cat([arg.cos(), arg.sin()], dim=1).to(position.dtype)  # <- here


class FlowSchedule:
    def __init__(self, n=1000, shift=5.0):
        s = torch.linspace(1.0, 0.0, n + 1)[:-1]
        self.sigmas = shift * s / (1 + (shift - 1) * s)
        self.timesteps = self.sigmas * n

    def mix(self, x, noise, idx):
        sig = self.sigmas[idx].to(x.device).view(-1, 1, 1, 1, 1)
        return (1 - sig) * x + sig * noise


class Block(nn.Module):
    def __init__(self, d):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(d, elementwise_affine=False), nn.LayerNorm(d, elementwise_affine=False)
        self.attn = nn.MultiheadAttention(d, 16, batch_first=True)
        self.ff = nn.Sequential(nn.Linear(d, 4 * d), nn.GELU("tanh"), nn.Linear(4 * d, d))
        self.mod = nn.Linear(d, 4 * d)

    def forward(self, x, c):
        s1, b1, s2, b2 = self.mod(c).unsqueeze(1).chunk(4, -1)
        h = self.n1(x) * (1 + s1) + b1
        x = x + self.attn(h, h, h, need_weights=False)[0]
        return x + self.ff(self.n2(x) * (1 + s2) + b2)


class VideoDiT(nn.Module):
    def __init__(self, channels=16, d=1536, depth=30):
        super().__init__()
        self.d = d
        self.patch = nn.Conv3d(channels, d, (1, 2, 2), (1, 2, 2))
        self.time = nn.Sequential(nn.Linear(d, d), nn.SiLU(), nn.Linear(d, d))
        self.blocks = nn.ModuleList(Block(d) for _ in range(depth))
        self.out = nn.ConvTranspose3d(d, channels, (1, 2, 2), (1, 2, 2))

    def forward(self, z, timestep):
        c = self.time(sinusoid(self.d, timestep))  # <- here
        h = self.patch(z)
        shape = h.shape
        h = h.flatten(2).transpose(1, 2)
        for b in self.blocks:
            h = b(h, c)
        return self.out(h.transpose(1, 2).reshape(shape))


class FlowTask(L.LightningModule):
    def __init__(self, compute_dtype=torch.bfloat16, lr=1e-5):
        super().__init__()
        self.dit, self.schedule = VideoDiT(), FlowSchedule()
        self.compute_dtype, self.lr = compute_dtype, lr

    def training_step(self, batch, _):
        x = batch["latents"].float()
        noise = torch.randn_like(x)
        idx = torch.randint(0, 1000, (len(x),))
        t = self.schedule.timesteps[idx].to(dtype=self.compute_dtype, device=self.device)  # <- here
        v = self.dit(self.schedule.mix(x, noise, idx), t)  # <- here
        loss = nn.functional.mse_loss(v.float(), noise - x)
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=self.lr, weight_decay=1e-2)


if __name__ == "__main__":
    from latents import LatentVideos

    trainer = L.Trainer(precision="bf16-mixed", max_epochs=5, accumulate_grad_batches=4, gradient_clip_val=1.0)
    trainer.fit(FlowTask(), DataLoader(LatentVideos(os.environ["LATENTS"]), 1, shuffle=True, num_workers=4))
