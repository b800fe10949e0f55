# style of: pytorch/vision:references/detection/engine.py
# torch: 1.6+
import math
import sys

import torch


def train_one_epoch(model, optimizer, data_loader, device, epoch, print_freq, scaler=None):
    model.train()
    lr_scheduler = None
    if epoch == 0:
        warmup_iters = max(1, min(1000, len(data_loader) - 1))
        lr_scheduler = torch.optim.lr_scheduler.LinearLR(
            optimizer, start_factor=1.0 / 1000, total_iters=warmup_iters
        )

    for i, (images, targets) in enumerate(data_loader):
        images = [image.to(device) for image in images]
        targets = [{k: v.to(device) if torch.is_tensor(v) else v for k, v in t.items()} for t in targets]
        with torch.cuda.amp.autocast(enabled=scaler is not None):
            loss_dict = model(images, targets)
            losses = sum(loss for loss in loss_dict.values())

        loss_value = losses.item()
        if not math.isfinite(loss_value):
            print(f"Loss is {loss_value}, stopping training")
            print({k: v.item() for k, v in loss_dict.items()})
            sys.exit(1)

        optimizer.zero_grad()
        stepped = True
        if scaler is not None:
            before = scaler.get_scale()
            scaler.scale(losses).backward()
            scaler.step(optimizer)
            scaler.update()
            stepped = scaler.get_scale() >= before
        else:
            losses.backward()
            optimizer.step()

        if lr_scheduler is not None and stepped:
            lr_scheduler.step()
        if i % print_freq == 0:
            print(epoch, i, loss_value, optimizer.param_groups[0]["lr"])


@torch.inference_mode()
def evaluate(model, data_loader, device, evaluator):
    cpu_device = torch.device("cpu")
    model.eval()
    for images, targets in data_loader:
        images = [img.to(device) for img in images]
        outputs = model(images)
        outputs = [{k: v.to(cpu_device) for k, v in t.items()} for t in outputs]
        evaluator.update({t["image_id"]: o for t, o in zip(targets, outputs)})
    return evaluator.summarize()
