# source: PolymathicAI/the_well issue #77
# mistake: the checkpoint for resuming holds model, optimizer and schedule but not the GradScaler, so a resumed run starts with the initial loss scale
# severity: warning
import os
import sys
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from surrogate.data import OceanWindows
from surrogate.unet import ResUNet

CFG = {
    "data": "/data/ocean/train.zarr",
    "depth": 4,
    "width": 64,
    "bs": 8,
    "epochs": 200,
    "lr": 1e-3,
    "ckpt": "ckpt/ocean.pt",
    "clip": 5.0,
}


def vrmse(pred, target):
    err = (pred - target).pow(2).mean(dim=(-2, -1))
    var = target.var(dim=(-2, -1)) + 1e-6
    return (err / var).sqrt().mean()


def write_checkpoint(path, model, optimizer, schedule, epoch, best):
    tmp = path + ".part"
    torch.save(  # <- here
        {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),  # <- here
            "schedule": schedule.state_dict(),
            "epoch": epoch,
            "best": best,
        },
        tmp,
    )
    os.replace(tmp, path)


def read_checkpoint(path, model, optimizer, schedule):
    blob = torch.load(path, map_location="cpu")
    model.load_state_dict(blob["model"])
    optimizer.load_state_dict(blob["optimizer"])  # <- here
    schedule.load_state_dict(blob["schedule"])
    return blob["epoch"] + 1, blob["best"]


def main(cfg):
    dev = torch.device("cuda")
    model = ResUNet(cfg["depth"], cfg["width"]).to(dev)
    optimizer = torch.optim.Adam(model.parameters(), lr=cfg["lr"])
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 50, 0.5)
    scaler = torch.cuda.amp.GradScaler()  # <- here
    start, best = 0, float("inf")
    if os.path.exists(cfg["ckpt"]):
        start, best = read_checkpoint(cfg["ckpt"], model, optimizer, schedule)  # <- here
        print(f"resuming at epoch {start}", file=sys.stderr)

    loader = DataLoader(OceanWindows(cfg["data"]), cfg["bs"], shuffle=True, num_workers=8, pin_memory=True)
    for epoch in range(start, cfg["epochs"]):
        t0, total = time.time(), 0.0
        model.train()
        for past, future in loader:
            past, future = past.to(dev, non_blocking=True), future.to(dev, non_blocking=True)
            optimizer.zero_grad()
            with torch.cuda.amp.autocast():
                out = model(past)
            loss = vrmse(out.float(), future) + 0.1 * F.l1_loss(out.float(), future)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), cfg["clip"])
            scaler.step(optimizer)
            scaler.update()
            total += loss.item()
        schedule.step()
        mean = total / len(loader)
        best = min(best, mean)
        write_checkpoint(cfg["ckpt"], model, optimizer, schedule, epoch, best)  # <- here
        print(f"{epoch:4d} {mean:.5f} {time.time() - t0:.0f}s")


if __name__ == "__main__":
    main(CFG)
