# source: https://github.com/PolymathicAI/the_well/issues/77
# mistake: the checkpoint carries model, optimizer and schedule but not the GradScaler, so each resume starts again from the default loss scale and skips or distorts the first steps.
# severity: warning
import argparse
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from wavelab.datasets import ShallowWater
from wavelab.models import FourierOperator


class Vault:
    """Keeps the last and the best state of a run in one folder."""

    def __init__(self, folder):
        self.folder = Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)

    @property
    def last(self):
        return self.folder / "last.pt"

    def write(self, payload, is_best):
        torch.save(payload, self.last)
        if is_best:
            torch.save(payload["net"], self.folder / "best_weights.pt")

    def read(self):
        return torch.load(self.last, map_location="cpu") if self.last.exists() else None


class Run:
    def __init__(self, opt):
        self.opt = opt
        self.device = torch.device("cuda")
        self.net = FourierOperator(modes=opt.modes, width=opt.width).to(self.device)
        self.optim = torch.optim.AdamW(self.net.parameters(), lr=opt.lr, weight_decay=1e-4)
        self.plan = torch.optim.lr_scheduler.CosineAnnealingLR(self.optim, opt.epochs)
        self.scaler = torch.cuda.amp.GradScaler()
        self.vault = Vault(opt.out)
        self.first, self.best = 0, float("inf")
        self.resume()

    def snapshot(self, epoch):
        return {  # <- here
            "net": self.net.state_dict(),
            "optim": self.optim.state_dict(),  # <- here
            "plan": self.plan.state_dict(),
            "epoch": epoch,
            "best": self.best,
        }

    def resume(self):
        state = self.vault.read()  # <- here
        if state is None:
            return
        self.net.load_state_dict(state["net"])
        self.optim.load_state_dict(state["optim"])  # <- here
        self.plan.load_state_dict(state["plan"])
        self.first = state["epoch"] + 1
        self.best = state["best"]

    def one_pass(self, loader):
        self.net.train()
        for now, later in loader:
            now, later = now.to(self.device), later.to(self.device)
            self.optim.zero_grad(set_to_none=True)
            with torch.cuda.amp.autocast():
                guess = self.net(now)
                loss = nn.functional.mse_loss(guess, later)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optim)
            nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)
            self.scaler.step(self.optim)
            self.scaler.update()

    @torch.no_grad()
    def measure(self, loader):
        self.net.eval()
        err = 0.0
        for now, later in loader:
            with torch.cuda.amp.autocast():
                guess = self.net(now.to(self.device))
            err += (guess.float().cpu() - later).pow(2).mean().item()
        return err / len(loader)

    def go(self):
        train = DataLoader(ShallowWater(self.opt.data, "train"), 16, shuffle=True, num_workers=8)
        valid = DataLoader(ShallowWater(self.opt.data, "valid"), 32, num_workers=8)
        for epoch in range(self.first, self.opt.epochs):
            self.one_pass(train)
            self.plan.step()
            err = self.measure(valid)
            better = err < self.best
            self.best = min(err, self.best)
            self.vault.write(self.snapshot(epoch), better)
            print(f"{epoch:03d} valid {err:.5f}{' *' if better else ''}")


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--out", default="runs/sw")
    p.add_argument("--modes", type=int, default=24)
    p.add_argument("--width", type=int, default=64)
    p.add_argument("--lr", type=float, default=1e-3)
    p.add_argument("--epochs", type=int, default=200)
    Run(p.parse_args()).go()
