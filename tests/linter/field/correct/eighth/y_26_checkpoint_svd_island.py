# why correct: the blocks are recomputed by torch's checkpoint, which restores autocast, and the SVD works on float32 with autocast disabled.
import argparse

import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.checkpoint import checkpoint
from torch.utils.data import DataLoader

from register.data import CloudPairs
from register.nets import PointMixer


def rigid_fit(src, dst, weight):
    """Weighted Kabsch: the rotation and shift which bring src onto dst."""
    with autocast(enabled=False):
        src, dst, weight = src.float(), dst.float(), weight.float()
        w = weight / weight.sum(1, keepdim=True).clamp(min=1e-6)
        ms = (w[..., None] * src).sum(1, keepdim=True)
        md = (w[..., None] * dst).sum(1, keepdim=True)
        cov = (w[..., None] * (src - ms)).transpose(1, 2) @ (dst - md)
        cov = cov + 1e-5 * torch.eye(3, device=cov.device)
        u, _, vh = torch.linalg.svd(cov)
        sign = torch.ones(len(cov), 3, device=cov.device)
        sign[:, 2] = torch.det(vh.transpose(1, 2) @ u.transpose(1, 2)).sign().detach()
        rot = vh.transpose(1, 2) @ torch.diag_embed(sign) @ u.transpose(1, 2)
        shift = md.squeeze(1) - (rot @ ms.transpose(1, 2)).squeeze(-1)
    return rot, shift


class Register(nn.Module):
    def __init__(self, dim=256, depth=8):
        super().__init__()
        self.lift = nn.Linear(3, dim)
        self.blocks = nn.ModuleList(PointMixer(dim) for _ in range(depth))
        self.trust = nn.Linear(dim, 1)

    def encode(self, cloud):
        x = self.lift(cloud)
        for block in self.blocks:
            x = checkpoint(block, x, use_reentrant=False)
        return x

    def forward(self, a, b):
        fa, fb = self.encode(a), self.encode(b)
        affinity = torch.bmm(fa * fa.shape[-1] ** -0.5, fb.transpose(1, 2))
        with autocast(enabled=False):
            soft = torch.softmax(affinity.float(), dim=-1)
            target = torch.bmm(soft, b.float())
        weight = torch.sigmoid(self.trust(fa)).squeeze(-1)
        return rigid_fit(a, target, weight)


def pose_loss(rot, shift, true_rot, true_shift):
    eye = torch.eye(3, device=rot.device)
    turn = (rot.transpose(1, 2) @ true_rot - eye).pow(2).sum((1, 2)).mean()
    return turn + (shift - true_shift).pow(2).sum(1).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("--epochs", type=int, default=60)
    ap.add_argument("--fp16", type=int, default=1)
    a = ap.parse_args()
    model = Register().cuda()
    opt = torch.optim.Adam(model.parameters(), lr=1e-4)
    plan = torch.optim.lr_scheduler.StepLR(opt, 20, 0.3)
    scaler = GradScaler(enabled=bool(a.fp16))
    loader = DataLoader(CloudPairs(a.root), 16, shuffle=True, num_workers=8, drop_last=True)
    for epoch in range(a.epochs):
        model.train()
        total = 0.0
        for src, dst, rot, shift in loader:
            src, dst, rot, shift = (t.cuda() for t in (src, dst, rot, shift))
            with autocast(enabled=bool(a.fp16)):
                r, t = model(src, dst)
            loss = pose_loss(r, t, rot, shift)
            opt.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(opt)
            scaler.update()
            total += loss.item()
        plan.step()
        print(f"epoch {epoch} loss {total / len(loader):.5f} scale {scaler.get_scale():.0f}")
        torch.save({"model": model.state_dict(), "opt": opt.state_dict(), "plan": plan.state_dict(),
                    "scaler": scaler.state_dict(), "epoch": epoch}, "register.pt")


if __name__ == "__main__":
    main()
