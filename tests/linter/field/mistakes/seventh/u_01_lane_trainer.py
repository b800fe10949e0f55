# source: https://github.com/milesial/Pytorch-UNet/issues/468
# mistake: gradients are clipped while they still carry the loss scale, so nearly every step is clipped to a tiny norm after unscaling
# severity: error
import logging
from pathlib import Path

import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

log = logging.getLogger("lanes")


class LaneTrainer:
    """Trains a lane segmentation network on a single GPU."""

    def __init__(self, net, train_set, cfg):
        self.net = net.cuda()
        self.cfg = cfg
        self.loader = DataLoader(train_set, batch_size=cfg["batch"], shuffle=True, num_workers=4, drop_last=True)
        self.opt = torch.optim.RMSprop(self.net.parameters(), lr=cfg["lr"], momentum=0.9, foreach=True)
        self.criterion = nn.CrossEntropyLoss(ignore_index=255)
        self.scaler = GradScaler(enabled=cfg["amp"])
        self.step_no = 0

    def fit(self):
        for epoch in range(self.cfg["epochs"]):
            avg = self._run_epoch()
            log.info("epoch %d: loss %.4f", epoch, avg)
            self._save(epoch)

    def _run_epoch(self):
        self.net.train()
        total = 0.0
        for img, lanes in self.loader:
            img = img.cuda(non_blocking=True)
            lanes = lanes.cuda(non_blocking=True)
            loss = self._loss(img, lanes)
            self._backward(loss)
            self._limit()
            self._advance()
            total += loss.item()
        return total / len(self.loader)

    def _loss(self, img, lanes):
        with autocast(enabled=self.cfg["amp"]):
            return self.criterion(self.net(img), lanes)

    def _backward(self, loss):
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()

    def _limit(self):
        nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg["max_norm"])  # <- here

    def _advance(self):
        self.scaler.step(self.opt)  # <- here
        self.scaler.update()
        self.step_no += 1

    def _save(self, epoch):
        out = Path(self.cfg["out"])
        out.mkdir(parents=True, exist_ok=True)
        torch.save(
            {"net": self.net.state_dict(), "opt": self.opt.state_dict(), "scaler": self.scaler.state_dict(), "epoch": epoch},
            out / f"ep{epoch:03d}.pt",
        )
