"""
# style of: hkchengrex/STCN:model/model.py
# correct: with AMP the scaler steps, without it the optimizer does; the plain optimizer.step() stands only in the other branch.
# torch: 1.7+
"""
from os import path

import torch
import torch.nn as nn
import torch.optim as optim

from model.losses import LossComputer
from model.network import STCN


class STCNModel:
    def __init__(self, para, logger=None, save_path=None, local_rank=0, world_size=1):
        self.para = para
        self.single_object = para["single_object"]
        self.local_rank = local_rank
        self.STCN = nn.parallel.DistributedDataParallel(
            STCN(self.single_object).cuda(), device_ids=[local_rank], broadcast_buffers=False
        )
        self.logger = logger
        self.save_path = save_path
        self.loss_computer = LossComputer(para)
        self.train()
        self.optimizer = optim.Adam(
            filter(lambda p: p.requires_grad, self.STCN.parameters()), lr=para["lr"], weight_decay=1e-7
        )
        self.scheduler = optim.lr_scheduler.MultiStepLR(self.optimizer, para["steps"], para["gamma"])
        if para["amp"]:
            self.scaler = torch.cuda.amp.GradScaler()

    def do_pass(self, data, it=0):
        torch.set_grad_enabled(self._is_train)
        for k, v in data.items():
            if torch.is_tensor(v):
                data[k] = v.cuda(non_blocking=True)
        frames, masks = data["rgb"], data["gt"]

        out = {}
        with torch.cuda.amp.autocast(enabled=self.para["amp"]):
            k16, kf16_thin, kf16, kf8, kf4 = self.STCN("encode_key", frames)
            ref_v = self.STCN("encode_value", frames[:, 0], kf16[:, 0], masks[:, 0])
            logits, mask = self.STCN("segment", k16[:, :, 1], kf8[:, 1], kf4[:, 1], k16[:, :, 0:1], ref_v)
            out["logits_1"], out["mask_1"] = logits, mask
            if self._is_train:
                losses = self.loss_computer.compute({**data, **out}, it)

        if not self._is_train:
            return out

        # one backward pass for the whole clip
        self.optimizer.zero_grad(set_to_none=True)
        if self.para["amp"]:
            self.scaler.scale(losses["total_loss"]).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            losses["total_loss"].backward()
            self.optimizer.step()
        if self.logger is not None and it % 100 == 0:
            self.logger.log_metrics("train", {k: v.item() for k, v in losses.items()}, it)

    def end_epoch(self):
        self.scheduler.step()

    def save_checkpoint(self, it):
        checkpoint = {
            "it": it,
            "network": self.STCN.module.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "scheduler": self.scheduler.state_dict(),
        }
        if self.para["amp"]:
            checkpoint["scaler"] = self.scaler.state_dict()
        torch.save(checkpoint, f"{self.save_path}_checkpoint.pth")

    def load_model(self, file):
        checkpoint = torch.load(path.expanduser(file), map_location=f"cuda:{self.local_rank}")
        self.STCN.module.load_state_dict(checkpoint["network"])
        self.optimizer.load_state_dict(checkpoint["optimizer"])
        self.scheduler.load_state_dict(checkpoint["scheduler"])
        if self.para["amp"] and "scaler" in checkpoint:
            self.scaler.load_state_dict(checkpoint["scaler"])
        return checkpoint["it"]

    def train(self):
        self._is_train = True
        self.STCN.train()
