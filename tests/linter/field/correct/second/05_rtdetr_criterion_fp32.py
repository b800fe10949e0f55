"""
# style of: lyuwenyu/RT-DETR:rtdetrv2_pytorch/src/solver/det_engine.py
# correct: the model runs under autocast and the criterion deliberately in float32 (autocast disabled, outputs cast); autocast(enabled=False) here is no forgotten flag.
# torch: 1.10+
"""
import math
import sys

import torch
import torch.amp


def to_float(obj):
    if torch.is_tensor(obj):
        return obj.float() if obj.is_floating_point() else obj
    if isinstance(obj, dict):
        return {k: to_float(v) for k, v in obj.items()}
    if isinstance(obj, (list, tuple)):
        return type(obj)(to_float(v) for v in obj)
    return obj


def train_one_epoch(model, criterion, data_loader, optimizer, device, epoch, max_norm=0.0, **kwargs):
    model.train()
    criterion.train()
    ema = kwargs.get("ema")
    scaler = kwargs.get("scaler")
    warmup = kwargs.get("lr_warmup_scheduler")

    for i, (samples, targets) in enumerate(data_loader):
        samples = samples.to(device)
        targets = [{k: v.to(device) for k, v in t.items()} for t in targets]
        metas = dict(epoch=epoch, step=i, global_step=epoch * len(data_loader) + i)

        if scaler is not None:
            with torch.autocast(device_type=str(device).split(":")[0], cache_enabled=True):
                outputs = model(samples, targets=targets)
            with torch.autocast(device_type=str(device).split(":")[0], enabled=False):
                loss_dict = criterion(to_float(outputs), targets, **metas)

            loss = sum(loss_dict.values())
            scaler.scale(loss).backward()
            if max_norm > 0:
                scaler.unscale_(optimizer)
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            before = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            stepped = scaler.get_scale() >= before
            optimizer.zero_grad()
        else:
            outputs = model(samples, targets=targets)
            loss_dict = criterion(outputs, targets, **metas)
            loss = sum(loss_dict.values())
            optimizer.zero_grad()
            loss.backward()
            if max_norm > 0:
                torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
            optimizer.step()
            stepped = True

        if stepped:
            if ema is not None:
                ema.update(model)
            if warmup is not None:
                warmup.step()

        value = sum(v.item() for v in loss_dict.values())
        if not math.isfinite(value):
            print(f"Loss is {value}, stopping training")
            print({k: v.item() for k, v in loss_dict.items()})
            sys.exit(1)
    return value
