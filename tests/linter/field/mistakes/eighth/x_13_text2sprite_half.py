# source: afiaka87/glide-finetune PR #6
# mistake: the whole model is float16 and Adam keeps its default eps of 1e-8, which is zero there: the first steps divide by zero and give NaN
# severity: error
import argparse
import glob
import os
import random

import numpy as np
import torch
import torch.nn.functional as F
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Sprites(Dataset):
    def __init__(self, folder, size=64):
        self.files = sorted(glob.glob(os.path.join(folder, "*.png")))
        self.size = size

    def __len__(self):
        return len(self.files)

    def __getitem__(self, i):
        img = Image.open(self.files[i]).convert("RGB").resize((self.size, self.size))
        x = torch.from_numpy(np.asarray(img, dtype=np.float32) / 127.5 - 1).permute(2, 0, 1)
        if random.random() < 0.5:
            x = x.flip(-1)
        return x


class Denoiser(nn.Module):
    def __init__(self, ch=128):
        super().__init__()
        self.time = nn.Sequential(nn.Linear(64, ch), nn.SiLU(), nn.Linear(ch, ch))
        self.inp = nn.Conv2d(3, ch, 3, padding=1)
        self.mid = nn.ModuleList(nn.Conv2d(ch, ch, 3, padding=1) for _ in range(8))
        self.norms = nn.ModuleList(nn.GroupNorm(16, ch) for _ in range(8))
        self.out = nn.Conv2d(ch, 3, 3, padding=1)

    def forward(self, x, t):
        freq = torch.exp(-torch.arange(32, device=x.device) * (9.2 / 32))
        arg = t[:, None].float() * freq
        emb = self.time(torch.cat([arg.sin(), arg.cos()], -1).to(x.dtype))[..., None, None]
        h = self.inp(x)
        for conv, norm in zip(self.mid, self.norms):
            h = h + conv(F.silu(norm(h) + emb))
        return self.out(h)


def build(args):
    model = Denoiser()
    if args.resume:
        model.load_state_dict(torch.load(args.resume, map_location="cpu"))
    model = model.cuda()
    if args.use_fp16:
        model.half()  # <- here
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.0)  # <- here
    return model, optimizer


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("folder")
    ap.add_argument("--resume")
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--epochs", type=int, default=50)
    ap.add_argument("--use_fp16", action="store_true")
    args = ap.parse_args()
    model, optimizer = build(args)
    dtype = torch.float16 if args.use_fp16 else torch.float32
    alpha = torch.linspace(1 - 1e-4, 0.98, 1000).cumprod(0).cuda()
    loader = DataLoader(Sprites(args.folder), 32, shuffle=True, num_workers=4, drop_last=True)
    for epoch in range(args.epochs):
        for x in loader:
            x = x.cuda()
            t = torch.randint(0, 1000, (x.size(0),), device="cuda")
            eps = torch.randn_like(x)
            a = alpha[t][:, None, None, None]
            noisy = a.sqrt() * x + (1 - a).sqrt() * eps
            pred = model(noisy.to(dtype), t)
            loss = F.mse_loss(pred.float(), eps)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()  # <- here
        print(epoch, loss.item())
    torch.save(model.state_dict(), "sprites.pt")


if __name__ == "__main__":
    main()
