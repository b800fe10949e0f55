# source: https://github.com/PolymathicAI/the_well/issues/77
# mistake: the checkpoint that training resumes from holds no GradScaler state, so a resumed run starts again from the initial scale and growth counter
# severity: warning
import os

import torch
import torch.nn as nn


class ResidualBlock(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.net = nn.Sequential(
            nn.GroupNorm(8, ch), nn.SiLU(), nn.Conv2d(ch, ch, 3, padding=1, padding_mode="circular"),
            nn.GroupNorm(8, ch), nn.SiLU(), nn.Conv2d(ch, ch, 3, padding=1, padding_mode="circular"),
        )

    def forward(self, x):
        return x + self.net(x)


class Emulator(nn.Module):
    def __init__(self, fields=3, ch=96, depth=8):
        super().__init__()
        self.lift = nn.Conv2d(fields, ch, 1)
        self.blocks = nn.Sequential(*[ResidualBlock(ch) for _ in range(depth)])
        self.drop = nn.Conv2d(ch, fields, 1)

    def forward(self, state):
        return state + self.drop(self.blocks(self.lift(state)))


class Run:
    def __init__(self, folder, lr=1e-3, epochs=200):
        self.folder, self.epochs = folder, epochs
        self.model = Emulator().cuda()
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, epochs)
        self.scaler = torch.amp.GradScaler("cuda")  # <- here
        self.epoch = 0
        self.best = float("inf")
        self.path = os.path.join(folder, "last.pt")

    def save(self):  # <- here
        os.makedirs(self.folder, exist_ok=True)
        torch.save({"epoch": self.epoch, "best": self.best, "model": self.model.state_dict(), "optimizer": self.opt.state_dict(), "scheduler": self.sched.state_dict()}, self.path)  # <- here

    def resume(self):  # <- here
        if not os.path.exists(self.path):
            return
        state = torch.load(self.path, map_location="cuda")  # <- here
        self.model.load_state_dict(state["model"])
        self.opt.load_state_dict(state["optimizer"])
        self.sched.load_state_dict(state["scheduler"])
        self.epoch, self.best = state["epoch"], state["best"]

    def train_epoch(self, loader):
        self.model.train()
        for now, later in loader:
            now, later = now.cuda(non_blocking=True), later.cuda(non_blocking=True)
            self.opt.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                loss = nn.functional.mse_loss(self.model(now), later)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        errors = []
        for now, later in loader:
            with torch.autocast("cuda", dtype=torch.float16):
                guess = self.model(now.cuda())
            errors.append((guess.float() - later.cuda()).pow(2).mean().item())
        return sum(errors) / len(errors)

    def go(self, train_loader, val_loader):
        self.resume()
        while self.epoch < self.epochs:
            self.train_epoch(train_loader)
            self.sched.step()
            self.epoch += 1
            self.best = min(self.best, self.validate(val_loader))
            self.save()
