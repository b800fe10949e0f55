# why correct: only the frozen teacher is cast to float16 and it gets float16 input; the student that is trained keeps float32 weights and uses autocast with a scaler.
import argparse
import os

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from depth.data import Drives
from depth.nets import BigDepth, TinyDepth
from depth.losses import scale_invariant


class Distiller(nn.Module):
    def __init__(self, teacher, student, width_t, width_s, alpha):
        super().__init__()
        self.student = student
        self.project = nn.Conv2d(width_s, width_t, 1)
        self.alpha = alpha
        self.__dict__["teacher"] = teacher

    def forward(self, image, depth, valid):
        with torch.no_grad(), torch.cuda.amp.autocast(enabled=False):
            t_depth, t_feat = self.teacher(image.half())
        s_depth, s_feat = self.student(image)
        truth = scale_invariant(s_depth.float(), depth, valid)
        soft = F.l1_loss(s_depth.float().log1p(), t_depth.float().log1p())
        feat = 1 - F.cosine_similarity(self.project(s_feat).float().flatten(2), t_feat.float().flatten(2), dim=1).mean()
        return truth + self.alpha * (soft + feat), {"truth": truth.detach(), "soft": soft.detach(), "feat": feat.detach()}


def load_teacher(path):
    teacher = BigDepth()
    teacher.load_state_dict(torch.load(path, map_location="cpu"))
    return teacher.half().cuda().eval().requires_grad_(False)


@torch.no_grad()
def validate(student, loader):
    student.eval()
    rel, count = 0.0, 0
    for image, depth, valid in loader:
        with torch.cuda.amp.autocast():
            guess, _ = student(image.cuda())
        guess = guess.float().cpu()
        rel += ((guess - depth).abs() / depth.clamp(min=0.1))[valid].sum().item()
        count += valid.sum().item()
    student.train()
    return rel / max(count, 1)


def main(a):
    os.makedirs(a.out, exist_ok=True)
    distiller = Distiller(load_teacher(a.teacher), TinyDepth(), 1024, 96, a.alpha).cuda()
    optimizer = torch.optim.AdamW(distiller.parameters(), lr=a.lr, weight_decay=1e-2)
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, a.epochs)
    scaler = torch.cuda.amp.GradScaler()
    train = DataLoader(Drives(a.root, "train"), a.batch, shuffle=True, num_workers=8, drop_last=True)
    valid = DataLoader(Drives(a.root, "val"), a.batch, num_workers=4)
    for epoch in range(a.epochs):
        distiller.train()
        for i, (image, depth, mask) in enumerate(train):
            image, depth, mask = image.cuda(), depth.cuda(), mask.cuda()
            optimizer.zero_grad(set_to_none=True)
            with torch.cuda.amp.autocast():
                loss, parts = distiller(image, depth, mask)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(distiller.parameters(), 5.0)
            scaler.step(optimizer)
            scaler.update()
            if i % 100 == 0:
                print(epoch, i, {k: round(v.item(), 4) for k, v in parts.items()})
        plan.step()
        print(f"epoch {epoch} abs rel {validate(distiller.student, valid):.4f}")
        torch.save(distiller.student.state_dict(), os.path.join(a.out, "student.pt"))


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("root")
    p.add_argument("teacher")
    p.add_argument("--out", default="distilled")
    p.add_argument("--alpha", type=float, default=0.5)
    p.add_argument("--lr", type=float, default=4e-4)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--epochs", type=int, default=25)
    main(p.parse_args())
