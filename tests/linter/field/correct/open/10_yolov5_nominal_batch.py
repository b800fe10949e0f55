# style of: ultralytics/yolov5:train.py
# torch: 1.9+
import math
from copy import deepcopy

import numpy as np
import torch


class WeightAverage:
    def __init__(self, model, decay=0.9999, tau=2000):
        self.ema = deepcopy(model).eval()
        self.updates = 0
        self.decay = lambda x: decay * (1 - math.exp(-x / tau))
        for p in self.ema.parameters():
            p.requires_grad_(False)

    @torch.no_grad()
    def update(self, model):
        self.updates += 1
        d = self.decay(self.updates)
        source = model.state_dict()
        for k, v in self.ema.state_dict().items():
            if v.dtype.is_floating_point:
                v *= d
                v += (1 - d) * source[k].detach()


def train(hyp, model, compute_loss, optimizer, train_loader, epochs, batch_size, device):
    cuda = device.type != "cpu"
    nbs = 64  # nominal batch size
    accumulate = max(round(nbs / batch_size), 1)
    nb = len(train_loader)
    nw = max(round(hyp["warmup_epochs"] * nb), 100)
    last_opt_step = -1
    scaler = torch.cuda.amp.GradScaler(enabled=cuda)
    ema = WeightAverage(model)
    lf = lambda e: (1 - e / epochs) * (1.0 - hyp["lrf"]) + hyp["lrf"]
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lf)

    optimizer.zero_grad()
    for epoch in range(epochs):
        model.train()
        for i, (imgs, targets) in enumerate(train_loader):
            ni = i + nb * epoch
            imgs = imgs.to(device, non_blocking=True).float() / 255
            if ni <= nw:
                xi = [0, nw]
                accumulate = max(1, np.interp(ni, xi, [1, nbs / batch_size]).round())
                for x in optimizer.param_groups:
                    x["lr"] = np.interp(ni, xi, [0.0, x["initial_lr"] * lf(epoch)])

            with torch.cuda.amp.autocast(enabled=cuda):
                pred = model(imgs)
                # the criterion already multiplies by the batch size: sums, not means, accumulate
                loss, loss_items = compute_loss(pred, targets.to(device))

            scaler.scale(loss).backward()

            if ni - last_opt_step >= accumulate:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=10.0)
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                ema.update(model)
                last_opt_step = ni
        scheduler.step()

        torch.save(
            {
                "epoch": epoch,
                "scheduler": scheduler.state_dict(),
                "model": model.state_dict(),
                "ema": ema.ema.state_dict(),
                "updates": ema.updates,
                "optimizer": optimizer.state_dict(),
                "scaler": scaler.state_dict(),
            },
            "last.pt",
        )
    return ema.ema
