# source: microsoft/Swin-Transformer issue #311
# mistake: unscale_ is called for every micro-batch although step and update come only every ACCUM micro-batches, so the second micro-batch raises a RuntimeError
# severity: error
# %% [markdown]
# # Masked autoencoder on multispectral tiles

# %%
import os
import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from tiles import TileFolder
from vit import MaskedAutoencoder

ACCUM = int(os.environ.get("ACCUM", 8))
MICRO = 32
EPOCHS = 200
MASK = 0.75
CLIP = 3.0
BASE_LR = 1.5e-4

# %%
ds = TileFolder("/data/sentinel2", bands=10, size=128)
dl = DataLoader(ds, batch_size=MICRO, shuffle=True, num_workers=12, drop_last=True, pin_memory=True)
usable = len(dl) // ACCUM * ACCUM

mae = MaskedAutoencoder(in_chans=10, patch=8, dim=512, depth=12, heads=8).cuda()


def groups(model, wd):
    flat = [p for p in model.parameters() if p.ndim < 2]
    rest = [p for p in model.parameters() if p.ndim >= 2]
    return [{"params": rest, "weight_decay": wd}, {"params": flat, "weight_decay": 0.0}]


opt = torch.optim.AdamW(groups(mae, 0.05), lr=BASE_LR * MICRO * ACCUM / 256, betas=(0.9, 0.95))
sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, EPOCHS)
scaler = GradScaler()

# %%
start = 0
if os.path.exists("mae_last.pt"):
    ck = torch.load("mae_last.pt", map_location="cuda")
    mae.load_state_dict(ck["mae"])
    opt.load_state_dict(ck["opt"])
    sched.load_state_dict(ck["sched"])
    scaler.load_state_dict(ck["scaler"])
    start = ck["epoch"] + 1

# %%
for epoch in range(start, EPOCHS):
    mae.train()
    opt.zero_grad(set_to_none=True)
    total, norm = 0.0, torch.tensor(0.0)
    for i, tile in enumerate(dl):
        if i >= usable:
            break
        tile = tile.cuda(non_blocking=True)
        with autocast():
            rec, hidden = mae(tile, mask_ratio=MASK)
            err = (rec.float() - mae.patchify(tile)) ** 2
            loss = (err.mean(-1) * hidden).sum() / hidden.sum()
        scaler.scale(loss / ACCUM).backward()
        scaler.unscale_(opt)  # <- here
        norm = nn.utils.clip_grad_norm_(mae.parameters(), CLIP)  # <- here
        if (i + 1) % ACCUM == 0:
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
        total += loss.item()
    sched.step()
    print(f"{epoch:03d} loss {total / usable:.4f} |g| {norm.item():.2f} scale {scaler.get_scale():.0f}")
    torch.save({"mae": mae.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                "scaler": scaler.state_dict(), "epoch": epoch}, "mae_last.pt")
