"""
# style of: lliuz/ARFlow:trainer/kitti_trainer.py
# correct: a constant loss scale done by hand, consistently: the loss is multiplied by it and every gradient divided by the same number before the clip and the step.
# torch: any
"""
import time

import torch
from torch import nn

from flow_losses import UnFlowLoss
from pwclite import PWCLite

LOSS_SCALE = 1024.0


class AverageMeter:
    def __init__(self):
        self.sum, self.count = 0.0, 0

    def update(self, value, n):
        self.sum += value * n
        self.count += n

    @property
    def avg(self):
        return self.sum / max(self.count, 1)


class TrainFramework:
    def __init__(self, cfg, train_loader):
        self.cfg = cfg
        self.train_loader = train_loader
        self.model = PWCLite(cfg.model).cuda()
        self.loss_func = UnFlowLoss(cfg.loss)
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.lr, betas=(0.9, 0.999))
        self.i_iter = 0

    def _unscale(self):
        finite = True
        for p in self.model.parameters():
            if p.grad is not None:
                p.grad.div_(LOSS_SCALE)
                finite = finite and bool(torch.isfinite(p.grad).all())
        return finite

    def _run_one_epoch(self):
        loss_meter, start = AverageMeter(), time.time()
        self.model.train()
        for data in self.train_loader:
            img1, img2 = data["img1"].cuda(), data["img2"].cuda()
            with torch.autocast("cuda", dtype=torch.float16):
                res = self.model(torch.cat([img1, img2], 1), with_bk=True)
            flows = [torch.cat([f, b], 1).float() for f, b in zip(res["flows_fw"], res["flows_bw"])]
            loss, l_photo, l_smooth, flow_mean = self.loss_func(flows, torch.cat([img1, img2], 1))
            loss_meter.update(loss.item(), img1.size(0))

            self.optimizer.zero_grad()
            scaled_loss = LOSS_SCALE * loss
            scaled_loss.backward()
            if self._unscale():
                nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.max_norm)
                self.optimizer.step()
            else:
                print(f"iteration {self.i_iter}: overflow, step left out")

            if self.i_iter % self.cfg.record_freq == 0:
                print(
                    f"{self.i_iter}: loss {loss_meter.avg:.4f} photo {l_photo.item():.4f} smooth {l_smooth.item():.4f} "
                    f"flow {flow_mean.item():.2f} {time.time() - start:.0f}s"
                )
            self.i_iter += 1

    def train(self):
        for epoch in range(self.cfg.epoch_num):
            self._run_one_epoch()
            torch.save({"epoch": epoch, "state_dict": self.model.state_dict()}, f"{self.cfg.save_root}/model.pth.tar")
