# source: microsoft/Swin-Transformer issue #311
# mistake: unscale_ is called on every micro-batch although step and update come only every few, so the second call raises
# severity: error
import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast


class PatchReconstructor(nn.Module):
    def __init__(self, dim=384, patch=16, depth=8, heads=6, image=224):
        super().__init__()
        n = (image // patch) ** 2
        self.patch = patch
        self.embed = nn.Conv2d(3, dim, patch, patch)
        self.pos = nn.Parameter(torch.zeros(1, n, dim))
        self.mask_token = nn.Parameter(torch.zeros(1, 1, dim))
        layer = nn.TransformerEncoderLayer(dim, heads, dim * 4, batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, depth)
        self.out = nn.Linear(dim, patch * patch * 3)

    def patchify(self, x):
        b, c, h, w = x.shape
        p = self.patch
        x = x.view(b, c, h // p, p, w // p, p).permute(0, 2, 4, 3, 5, 1)
        return x.reshape(b, -1, p * p * c)

    def forward(self, x, mask):
        t = self.embed(x).flatten(2).transpose(1, 2)
        t = torch.where(mask[..., None], self.mask_token.to(t.dtype), t) + self.pos
        pred = self.out(self.blocks(t))
        per_patch = (pred.float() - self.patchify(x)).abs().mean(-1)
        return (per_patch * mask).sum() / mask.sum().clamp(min=1)


def gradient_norm(model):
    norms = [p.grad.norm() for p in model.parameters() if p.grad is not None]
    return torch.stack(norms).norm()


def pretrain_epoch(model, loader, optimizer, scaler, schedule, accum, clip, ratio=0.6, device="cuda"):
    model.train()
    optimizer.zero_grad()
    usable = len(loader) - len(loader) % accum
    history = []
    for i, tiles in enumerate(loader):
        if i >= usable:
            break
        tiles = tiles.to(device)
        mask = torch.rand(tiles.size(0), model.pos.size(1), device=device) < ratio
        with autocast():
            loss = model(tiles, mask)
        scaler.scale(loss / accum).backward()
        scaler.unscale_(optimizer)  # <- here
        if clip > 0:
            norm = nn.utils.clip_grad_norm_(model.parameters(), clip)  # <- here
        else:
            norm = gradient_norm(model)
        if (i + 1) % accum == 0:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        history.append((loss.item(), float(norm)))
    schedule.step()
    return history


def run(loader, epochs=100, accum=4):
    model = PatchReconstructor().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-4, betas=(0.9, 0.95), weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, epochs)
    scaler = GradScaler()
    for epoch in range(epochs):
        h = pretrain_epoch(model, loader, optimizer, scaler, schedule, accum, clip=5.0)
        print(epoch, sum(x for x, _ in h) / len(h))
    torch.save(model.state_dict(), "mim.pth")
