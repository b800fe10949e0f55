# why correct: model and average are both float32 while only activations are float16; the average moves after each real step and is the one evaluated
import copy

import torch
from torch import nn
from torch.nn import functional as F


class Average:
    def __init__(self, model, decay=0.9995):
        self.model = copy.deepcopy(model).eval().requires_grad_(False)
        self.decay, self.count = decay, 0

    @torch.no_grad()
    def track(self, model):
        self.count += 1
        d = min(self.decay, (1 + self.count) / (10 + self.count))
        for slow, fast in zip(self.model.parameters(), model.parameters()):
            slow.lerp_(fast, 1 - d)
        for slow, fast in zip(self.model.buffers(), model.buffers()):
            slow.copy_(fast)


class VoxelNet(nn.Module):
    def __init__(self, channels=8, width=32, out=1):
        super().__init__()
        stages, last = [], channels
        for i in range(4):
            now = width * 2 ** i
            stages += [nn.Conv3d(last, now, 3, padding=1), nn.BatchNorm3d(now), nn.ReLU(), nn.MaxPool3d(2)]
            last = now
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(last, out)

    def forward(self, grid):
        return self.head(self.stages(grid).mean((2, 3, 4))).squeeze(-1)


@torch.no_grad()
def rmse(model, loader):
    square, n = 0.0, 0
    for grid, affinity in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            guess = model(grid.cuda())
        square += (guess.float() - affinity.cuda()).square().sum().item()
        n += affinity.numel()
    return (square / n) ** 0.5


def train(train_loader, val_loader, epochs=60, lr=3e-4):
    model = VoxelNet().cuda()
    average = Average(model)
    opt = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 14)
    best = float("inf")
    for epoch in range(epochs):
        model.train()
        for grid, affinity in train_loader:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.mse_loss(model(grid.cuda()), affinity.cuda())
            scaler.scale(loss).backward()
            old = scaler.get_scale()
            scaler.step(opt)
            scaler.update()
            opt.zero_grad(set_to_none=True)
            if scaler.get_scale() >= old:
                average.track(model)
        score = rmse(average.model, val_loader)
        print(epoch, score)
        if score < best:
            best = score
            torch.save(average.model.state_dict(), "affinity-best.pt")
    return best
