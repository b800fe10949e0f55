# source: https://github.com/open-mmlab/mmdetection3d/issues/1842
# mistake: float16 features made under autocast are written by index into a float32 canvas; index assignment does not promote, so it raises RuntimeError.
# severity: error
# torch: any
import torch
import torch.nn as nn


class PillarScatter(nn.Module):
    def __init__(self, channels, grid):
        super().__init__()
        self.channels = channels
        self.ny, self.nx = grid

    def forward(self, feats, coords, batch_size):
        out = []
        for b in range(batch_size):
            sel = coords[:, 0] == b
            flat = coords[sel, 1] * self.nx + coords[sel, 2]
            canvas = torch.zeros(self.ny * self.nx, self.channels, device=feats.device)
            canvas[flat.long()] = feats[sel]  # <- here
            out.append(canvas.t().view(self.channels, self.ny, self.nx))
        return torch.stack(out)


class PillarDetector(nn.Module):
    def __init__(self, grid=(256, 256), channels=64):
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(9, channels), nn.ReLU(), nn.Linear(channels, channels))
        self.scatter = PillarScatter(channels, grid)
        self.head = nn.Conv2d(channels, 8, 3, padding=1)

    def forward(self, points, coords, batch_size):
        feats = self.encoder(points).amax(dim=1)
        return self.head(self.scatter(feats, coords, batch_size))


def train_step(model, batch, optimizer, scaler):
    optimizer.zero_grad()
    with torch.amp.autocast("cuda", dtype=torch.float16):
        pred = model(batch["points"], batch["coords"], batch["batch_size"])
        loss = nn.functional.smooth_l1_loss(pred, batch["heat"])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    nn.utils.clip_grad_norm_(model.parameters(), 35.0)
    scaler.step(optimizer)
    scaler.update()
    return loss.detach()


def train_detector(model, loader, max_epochs=24):
    model.cuda().train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(max_epochs):
        for batch in loader:
            loss = train_step(model, batch, optimizer, scaler)
        print(epoch, float(loss))
