# why correct: fabric.backward scales, fabric.clip_gradients unscales first and only at the end of a window, the wrapped optimizer skips on overflow
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader

from soil.profiles import SpectraProfiles

HYPER = dict(lr=5e-4, batch=64, accum=4, epochs=80, clip=1.0, targets=("carbon", "clay", "ph"))


class ProfileNet(nn.Module):
    def __init__(self, bands=2101, targets=3, width=512):
        super().__init__()
        self.front = nn.Sequential(nn.Conv1d(1, 32, 21, 5, 10), nn.GELU(), nn.Conv1d(32, 64, 11, 5, 5), nn.GELU(), nn.Flatten())
        self.depth = nn.Linear(1, 64)
        with torch.no_grad():
            flat = self.front(torch.zeros(1, 1, bands)).shape[1]
        self.head = nn.Sequential(nn.Linear(flat + 64, width), nn.GELU(), nn.Dropout(0.2), nn.Linear(width, targets))

    def forward(self, spectrum, depth):
        h = torch.cat([self.front(spectrum[:, None]), F.gelu(self.depth(depth[:, None]))], -1)
        return self.head(h)


def masked_mse(pred, truth):
    known = ~torch.isnan(truth)
    diff = torch.where(known, pred.float() - torch.nan_to_num(truth), torch.zeros_like(truth))
    return diff.square().sum() / known.sum().clamp(min=1)


def evaluate(fabric, model, loader):
    model.eval()
    err = torch.zeros(2, device=fabric.device)
    with torch.no_grad():
        for spectrum, depth, truth in loader:
            err += torch.stack([masked_mse(model(spectrum, depth), truth), torch.ones((), device=fabric.device)])
    model.train()
    err = fabric.all_reduce(err, reduce_op="sum")
    return (err[0] / err[1]).sqrt().item()


def main(hp=HYPER):
    fabric = L.Fabric(accelerator="cuda", devices=2, strategy="ddp", precision="16-mixed")
    fabric.launch()
    fabric.seed_everything(21)
    with fabric.init_module():
        model = ProfileNet(targets=len(hp["targets"]))
    optimizer = torch.optim.AdamW(model.parameters(), lr=hp["lr"], weight_decay=0.02)
    model, optimizer = fabric.setup(model, optimizer)
    train = fabric.setup_dataloaders(DataLoader(SpectraProfiles("train"), hp["batch"], shuffle=True, drop_last=True))
    valid = fabric.setup_dataloaders(DataLoader(SpectraProfiles("valid"), hp["batch"]))
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, hp["epochs"])

    best = float("inf")
    for epoch in range(hp["epochs"]):
        model.train()
        usable = len(train) // hp["accum"] * hp["accum"]
        for i, (spectrum, depth, truth) in enumerate(train):
            if i >= usable:
                break
            going_on = (i + 1) % hp["accum"] != 0
            with fabric.no_backward_sync(model, enabled=going_on):
                loss = masked_mse(model(spectrum, depth), truth)
                fabric.backward(loss / hp["accum"])
            if going_on:
                continue
            fabric.clip_gradients(model, optimizer, max_norm=hp["clip"])
            optimizer.step()
            optimizer.zero_grad()
        plan.step()
        rmse = evaluate(fabric, model, valid)
        fabric.print(f"epoch {epoch}: rmse {rmse:.4f}")
        if rmse < best:
            best = rmse
            fabric.save("soil_best.ckpt", {"model": model})


if __name__ == "__main__":
    main()
