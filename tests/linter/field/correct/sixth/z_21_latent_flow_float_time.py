# why correct: latents are bfloat16 and the network runs under bfloat16 autocast, but sampled times stay float32 until after the sine/cosine embedding
import math
from functools import cached_property

import torch
from transformers import Trainer, TrainingArguments
from torch import nn


def embed_time(t, dim, top=10_000.0):
    t = t.float() * 1000.0
    f = torch.exp(torch.arange(dim // 2, device=t.device, dtype=torch.float32) * (-math.log(top) / (dim // 2)))
    a = t[:, None] * f
    return torch.cat([a.sin(), a.cos()], -1)


class FlowNet(nn.Module):
    def __init__(self, channels=4, dim=512, depth=8):
        super().__init__()
        self.dim = dim
        self.inp, self.out = nn.Conv2d(channels, dim, 2, 2), nn.ConvTranspose2d(dim, channels, 2, 2)
        self.time = nn.Sequential(nn.Linear(dim, dim), nn.SiLU(), nn.Linear(dim, dim))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True, norm_first=True, dropout=0.0) for _ in range(depth))

    def velocity(self, x, t):
        h = self.inp(x)
        shape = h.shape
        h = h.flatten(2).transpose(1, 2) + self.time(embed_time(t, self.dim))[:, None]
        for b in self.blocks:
            h = b(h)
        return self.out(h.transpose(1, 2).reshape(shape))

    def forward(self, latents):
        x1 = latents.float()
        x0 = torch.randn_like(x1)
        t = torch.sigmoid(torch.randn(len(x1), device=x1.device))
        s = t.view(-1, 1, 1, 1)
        v = self.velocity((1 - s) * x0 + s * x1, t)
        loss = (v.float() - (x1 - x0)).square().mean()
        return {"loss": loss, "mse": loss.detach()}


class LatentSet(torch.utils.data.Dataset):
    def __init__(self, path):
        self.path = path

    @cached_property
    def data(self):
        return torch.load(self.path, mmap=True)

    def __len__(self):
        return len(self.data)

    def __getitem__(self, i):
        return {"latents": self.data[i].to(torch.bfloat16)}


def main(path, out="flow"):
    args = TrainingArguments(
        output_dir=out, bf16=True, per_device_train_batch_size=64, gradient_accumulation_steps=2, max_grad_norm=1.0,
        learning_rate=2e-4, lr_scheduler_type="constant_with_warmup", warmup_steps=1000, max_steps=200_000,
        save_steps=5000, logging_steps=50, remove_unused_columns=False, dataloader_num_workers=8, report_to="none",
    )
    trainer = Trainer(model=FlowNet(), args=args, train_dataset=LatentSet(path))
    trainer.train()


if __name__ == "__main__":
    import sys

    main(sys.argv[1])
