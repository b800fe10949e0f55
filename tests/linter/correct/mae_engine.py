import math
from collections.abc import Iterable

import torch
import util.lr_sched as lr_sched
import util.misc as misc


def train_one_epoch(
    model: torch.nn.Module,
    data_loader: Iterable,
    optimizer: torch.optim.Optimizer,
    device,
    epoch,
    loss_scaler,
    args=None,
):
    model.train(True)
    accum_iter = args.accum_iter
    optimizer.zero_grad()
    for data_iter_step, (samples, _) in enumerate(data_loader):
        if data_iter_step % accum_iter == 0:
            lr_sched.adjust_learning_rate(optimizer, data_iter_step / len(data_loader) + epoch, args)
        samples = samples.to(device, non_blocking=True)
        with torch.amp.autocast("cuda"):
            loss, _, _ = model(samples, mask_ratio=args.mask_ratio)
        if not math.isfinite(misc.value_of(loss)):
            raise RuntimeError("loss is not finite")
        loss = loss / accum_iter
        loss_scaler(
            loss, optimizer, parameters=model.parameters(), update_grad=(data_iter_step + 1) % accum_iter == 0
        )
        if (data_iter_step + 1) % accum_iter == 0:
            optimizer.zero_grad()
        torch.cuda.synchronize()
