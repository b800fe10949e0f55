"""
# source: https://github.com/ultralytics/ultralytics/pull/22189
# mistake: resume_training() restores optimizer, EMA and epoch but not the GradScaler, although its state stands in the checkpoint; the loss scale is searched for anew.
# severity: warning
# torch: any
"""
import copy
from pathlib import Path

import torch
from torch import nn, optim


class BaseTrainer:
    def __init__(self, args, model, dataset):
        self.args = args
        self.device = torch.device("cuda:0")
        self.model = model
        self.dataset = dataset
        self.last = Path(args.save_dir) / "last.pt"
        self.start_epoch = 0

    def _setup_train(self, ckpt):
        self.model = self.model.to(self.device)
        self.amp = bool(self.args.amp)
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.amp)
        self.train_loader = torch.utils.data.DataLoader(self.dataset, self.args.batch, shuffle=True, num_workers=8)
        self.optimizer = optim.SGD(self.model.parameters(), lr=self.args.lr0, momentum=0.937, nesterov=True)
        self.scheduler = optim.lr_scheduler.LambdaLR(self.optimizer, lambda e: max(1 - e / self.args.epochs, 0.01))
        self.ema = copy.deepcopy(self.model).eval()
        self.resume_training(ckpt)
        self.scheduler.last_epoch = self.start_epoch - 1

    def resume_training(self, ckpt):
        if ckpt is None:
            return
        self.start_epoch = ckpt.get("epoch", -1) + 1
        self.model.load_state_dict(ckpt["model"])
        self.optimizer.load_state_dict(ckpt["optimizer"])  # <- here
        self.ema.load_state_dict(ckpt["ema"])

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        with torch.no_grad():
            for e, m in zip(self.ema.parameters(), self.model.parameters()):
                e.lerp_(m, 1e-4)

    def train(self, ckpt=None):
        self._setup_train(ckpt)
        for epoch in range(self.start_epoch, self.args.epochs):
            self.model.train()
            for batch in self.train_loader:
                with torch.autocast("cuda", enabled=self.amp):
                    loss = self.model({k: v.to(self.device) for k, v in batch.items()}).sum()
                self.scaler.scale(loss).backward()
                self.optimizer_step()
            self.scheduler.step()
            self.save_model(epoch)

    def save_model(self, epoch):
        torch.save(
            {
                "epoch": epoch,
                "model": self.model.state_dict(),
                "ema": self.ema.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
            },
            self.last,
        )
