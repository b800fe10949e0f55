# source: engichang1467/Open-Rig3R#35
# mistake: CUDA autocast is entered with its default dtype (float16) and the backward pass has no loss scaling, so small gradients underflow to zero
# severity: warning
import time

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import autocast


class RigNet(nn.Module):
    def __init__(self, dim=256):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, dim // 4, 7, 4, 3), nn.ReLU(), nn.Conv2d(dim // 4, dim, 3, 2, 1))
        layer = nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, 6)
        self.points = nn.Linear(dim, 3)
        self.rays = nn.Linear(dim, 6)

    def forward(self, img):
        tok = self.stem(img).flatten(2).transpose(1, 2)
        h = self.enc(tok)
        return {"points": self.points(h), "rays": self.rays(h)}


class MultiTask(nn.Module):
    def __init__(self, w_rays=0.5):
        super().__init__()
        self.w = w_rays

    def forward(self, out, gt):
        pts = F.mse_loss(out["points"].float(), gt["points"])
        d = out["rays"].float()
        ray = 1 - F.cosine_similarity(d[..., :3], gt["dirs"], dim=-1).mean()
        ctr = 1 - F.cosine_similarity(d[..., 3:], gt["centres"], dim=-1).mean()
        return pts + self.w * (ray + ctr)


def evaluate(model, criterion, loader, device):
    model.eval()
    losses = []
    with torch.no_grad():
        for img, gt in loader:
            gt = {k: v.to(device) for k, v in gt.items()}
            with autocast(device_type="cuda"):
                out = model(img.to(device))
            losses.append(criterion(out, gt).item())
    return sum(losses) / len(losses)


def train(model, train_loader, val_loader, epochs=20, lr=1e-4):
    device = torch.device("cuda")
    model.to(device)
    criterion = MultiTask()
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    for epoch in range(epochs):
        model.train()
        t0 = time.time()
        for img, gt in train_loader:
            gt = {k: v.to(device) for k, v in gt.items()}
            optimizer.zero_grad()
            with autocast(device_type="cuda"):  # <- here
                out = model(img.to(device))
            loss = criterion(out, gt)
            loss.backward()  # <- here
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()  # <- here
        print(f"{epoch}: train {loss.item():.4f} val {evaluate(model, criterion, val_loader, device):.4f} "
              f"({time.time() - t0:.0f}s)")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch}, "rig.pt")
