# style of: facebookresearch/ConvNeXt:engine.py
# torch: 1.6+
import math

import torch


def train_one_epoch(
    model, criterion, data_loader, optimizer, device, epoch, loss_scaler,
    max_norm=0.0, model_ema=None, lr_values=None, update_freq=1, use_amp=False, steps_per_epoch=None,
):
    """loss_scaler(loss, optimizer, clip_grad=, parameters=, update_grad=) wraps a GradScaler and returns the norm."""
    model.train(True)
    optimizer.zero_grad()
    steps_per_epoch = steps_per_epoch or len(data_loader) // update_freq
    losses, norms = [], []

    for data_iter_step, (samples, targets) in enumerate(data_loader):
        step = data_iter_step // update_freq
        if step >= steps_per_epoch:
            break
        if lr_values is not None and data_iter_step % update_freq == 0:
            for group in optimizer.param_groups:
                group["lr"] = lr_values[step + epoch * steps_per_epoch] * group.get("lr_scale", 1.0)

        samples = samples.to(device, non_blocking=True)
        targets = targets.to(device, non_blocking=True)
        if use_amp:
            with torch.cuda.amp.autocast():
                loss = criterion(model(samples), targets)
        else:
            loss = criterion(model(samples), targets)

        loss_value = loss.item()
        if not math.isfinite(loss_value):
            raise FloatingPointError(f"Loss is {loss_value}, stopping training")
        loss = loss / update_freq
        boundary = (data_iter_step + 1) % update_freq == 0

        if use_amp:
            norm = loss_scaler(
                loss, optimizer, clip_grad=max_norm or None, parameters=model.parameters(), update_grad=boundary
            )
            if norm is not None:
                norms.append(float(norm))
        else:
            loss.backward()
            if boundary:
                if max_norm:
                    norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
                optimizer.step()
        if boundary:
            optimizer.zero_grad()
            if model_ema is not None:
                model_ema.update(model)
        losses.append(loss_value)
    return {"loss": sum(losses) / len(losses), "grad_norm": sum(norms) / max(len(norms), 1)}


@torch.no_grad()
def evaluate(data_loader, model, device, use_amp=False):
    criterion = torch.nn.CrossEntropyLoss()
    model.eval()
    correct = total = 0
    loss_sum = 0.0
    for images, target in data_loader:
        images, target = images.to(device), target.to(device)
        with torch.cuda.amp.autocast(enabled=use_amp):
            output = model(images)
            loss = criterion(output, target)
        correct += (output.argmax(1) == target).sum().item()
        total += target.numel()
        loss_sum += loss.item() * target.numel()
    return correct / total, loss_sum / total
