# style of: wenet-e2e/wenet:wenet/utils/train_utils.py
# torch: 1.10+
import logging
from contextlib import nullcontext

import torch
import torch.distributed as dist
from torch.nn.utils import clip_grad_norm_


class Executor:
    def __init__(self, rank=0):
        self.rank = rank
        self.step = 0

    def train(self, model, optimizer, scheduler, data_loader, device, scaler, info):
        """model is a DistributedDataParallel; every rank sees the same number of batches."""
        model.train()
        accum_grad = info.get("accum_grad", 1)
        clip = info.get("grad_clip", 50.0)
        num_batches = len(data_loader)
        optimizer.zero_grad()

        for batch_idx, batch in enumerate(data_loader):
            batch = {k: v.to(device) for k, v in batch.items()}
            window_start = batch_idx - batch_idx % accum_grad
            window = min(accum_grad, num_batches - window_start)
            sync = batch_idx - window_start + 1 == window

            # forward and backward both inside no_sync, except for the window's last batch
            with nullcontext() if sync else model.no_sync():
                with torch.cuda.amp.autocast(enabled=scaler is not None):
                    loss_dict = model(batch)
                    loss = loss_dict["loss"] / window
                if scaler is not None:
                    scaler.scale(loss).backward()
                else:
                    loss.backward()

            if not sync:
                continue

            stepped = True
            if scaler is not None:
                scale = scaler.get_scale()
                scaler.unscale_(optimizer)
                grad_norm = clip_grad_norm_(model.parameters(), clip)
                # step() itself skips on inf/nan; update() is due since unscale_ was called
                scaler.step(optimizer)
                scaler.update()
                stepped = scaler.get_scale() >= scale
            else:
                grad_norm = clip_grad_norm_(model.parameters(), clip)
                stepped = bool(torch.isfinite(grad_norm))
                if stepped:
                    optimizer.step()
            optimizer.zero_grad()
            if stepped:
                scheduler.step()
            self.step += 1

            if self.rank == 0 and self.step % info.get("log_interval", 10) == 0:
                lr = optimizer.param_groups[0]["lr"]
                logging.info(
                    "step %d loss %.4f lr %.2e norm %.3f", self.step, loss.item() * window, lr, float(grad_norm)
                )

    @torch.no_grad()
    def cv(self, model, data_loader, device):
        model.eval()
        totals = torch.zeros(2, device=device)
        for batch in data_loader:
            batch = {k: v.to(device) for k, v in batch.items()}
            size = batch["target"].size(0)
            totals[0] += model.module(batch)["loss"] * size
            totals[1] += size
        dist.all_reduce(totals)
        return (totals[0] / totals[1]).item()
