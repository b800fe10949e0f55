# style of: ashawkey/torch-ngp:nerf/utils.py
# torch: 1.10+
import glob
import os

import torch
from torch_ema import ExponentialMovingAverage


class Trainer:
    def __init__(self, name, model, optimizer_fn, lr_scheduler_fn, criterion, workspace, fp16=False, ema_decay=None, device="cuda", use_checkpoint="latest"):
        self.name = name
        self.model = model.to(device)
        self.criterion = criterion
        self.device = device
        self.fp16 = fp16
        self.workspace = workspace
        self.optimizer = optimizer_fn(self.model)
        self.lr_scheduler = lr_scheduler_fn(self.optimizer)
        self.ema = ExponentialMovingAverage(self.model.parameters(), decay=ema_decay) if ema_decay else None
        self.scaler = torch.cuda.amp.GradScaler(enabled=self.fp16)
        self.epoch = 0
        self.global_step = 0
        if use_checkpoint == "latest":
            self.load_checkpoint()

    def train_step(self, data):
        out = self.model(data["rays_o"].to(self.device), data["rays_d"].to(self.device))
        return self.criterion(out["image"].float(), data["images"].to(self.device)).mean()

    def train_one_epoch(self, loader):
        self.model.train()
        total = 0.0
        for data in loader:
            self.global_step += 1
            self.optimizer.zero_grad()
            with torch.cuda.amp.autocast(enabled=self.fp16):
                loss = self.train_step(data)
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            total += loss.item()
        if self.ema is not None:
            self.ema.update()
        self.lr_scheduler.step()
        self.epoch += 1
        return total / len(loader)

    def evaluate_one_epoch(self, loader):
        self.model.eval()
        if self.ema is not None:
            self.ema.store()
            self.ema.copy_to()
        psnr = []
        with torch.no_grad():
            for data in loader:
                with torch.cuda.amp.autocast(enabled=self.fp16):
                    mse = self.train_step(data)
                psnr.append(-10.0 * torch.log10(mse.float() + 1e-10).item())
        if self.ema is not None:
            self.ema.restore()
        return sum(psnr) / len(psnr)

    def save_checkpoint(self):
        state = {
            "epoch": self.epoch,
            "global_step": self.global_step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "lr_scheduler": self.lr_scheduler.state_dict(),
            "scaler": self.scaler.state_dict(),
        }
        if self.ema is not None:
            state["ema"] = self.ema.state_dict()
        torch.save(state, os.path.join(self.workspace, f"{self.name}_ep{self.epoch:04d}.pth"))

    def load_checkpoint(self):
        found = sorted(glob.glob(os.path.join(self.workspace, f"{self.name}_ep*.pth")))
        if not found:
            return
        state = torch.load(found[-1], map_location=self.device)
        self.model.load_state_dict(state["model"])
        self.epoch, self.global_step = state["epoch"], state["global_step"]
        self.optimizer.load_state_dict(state["optimizer"])
        self.lr_scheduler.load_state_dict(state["lr_scheduler"])
        if state["scaler"]:
            self.scaler.load_state_dict(state["scaler"])
        if self.ema is not None and "ema" in state:
            self.ema.load_state_dict(state["ema"])
