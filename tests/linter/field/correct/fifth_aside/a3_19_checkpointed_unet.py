# why correct: activation checkpointing is non-reentrant and recomputes under the autocast state of the forward, and the loss-scaled gradients are unscaled before they are inspected
import torch
import torch.utils.checkpoint as cp
from torch import nn
from torch.nn import functional as F


class Stage(nn.Module):
    def __init__(self, i, o):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(i, o, 3, 1, 1), nn.GroupNorm(8, o), nn.SiLU(), nn.Conv2d(o, o, 3, 1, 1), nn.GroupNorm(8, o), nn.SiLU())

    def forward(self, x):
        return self.net(x)


class RadarUNet(nn.Module):
    def __init__(self, past=6, future=12, ch=48, save_memory=True):
        super().__init__()
        self.save_memory = save_memory
        sizes = [ch, 2 * ch, 4 * ch, 8 * ch]
        self.down = nn.ModuleList(Stage(i, o) for i, o in zip([past] + sizes[:-1], sizes))
        self.up = nn.ModuleList(Stage(a + b, b) for a, b in zip(sizes[:0:-1], sizes[-2::-1]))
        self.out = nn.Conv2d(ch, future, 1)

    def run(self, stage, x):
        if self.save_memory and self.training:
            return cp.checkpoint(stage, x, use_reentrant=False)
        return stage(x)

    def forward(self, x):
        kept = []
        for i, stage in enumerate(self.down):
            x = self.run(stage, x if i == 0 else F.avg_pool2d(x, 2))
            kept.append(x)
        x = kept.pop()
        for stage in self.up:
            x = F.interpolate(x, scale_factor=2, mode="nearest")
            x = self.run(stage, torch.cat([x, kept.pop()], 1))
        return self.out(x)


def rain_loss(guess, truth):
    weight = 1 + truth.clamp(0, 20)
    return (weight * (guess.float() - truth).abs()).mean()


def layer_norms(model):
    return {name: p.grad.norm().item() for name, p in model.named_parameters() if p.grad is not None and p.ndim > 1}


def train(loader, steps, log_every=500, lr=2e-4):
    model = RadarUNet().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=lr)
    scaler = torch.amp.GradScaler("cuda")
    for step, (past, future) in zip(range(steps), loader):
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = rain_loss(model(past.cuda()), future.cuda())
        scaler.scale(loss).backward()
        if step % log_every == 0:
            scaler.unscale_(opt)
            norms = layer_norms(model)
            print(step, loss.item(), max(norms, key=norms.get))
        scaler.step(opt)
        scaler.update()
    return model
