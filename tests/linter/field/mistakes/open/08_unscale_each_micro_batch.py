# source: https://github.com/microsoft/Swin-Transformer/issues/311
# mistake: with gradient accumulation unscale_ runs for every micro batch but update only at the step, which raises RuntimeError on the second micro batch.
# severity: error
# torch: any
import time

import torch
from timm.utils import AverageMeter


def get_grad_norm(parameters, norm_type=2.0):
    grads = [p.grad.detach() for p in parameters if p.grad is not None]
    return torch.norm(torch.stack([torch.norm(g, norm_type) for g in grads]), norm_type)


def train_one_epoch(config, model, data_loader, optimizer, epoch, scaler):
    model.train()
    optimizer.zero_grad()

    loss_meter, norm_meter, scale_meter = AverageMeter(), AverageMeter(), AverageMeter()
    start = time.time()
    for idx, (img, mask, _) in enumerate(data_loader):
        img = img.cuda(non_blocking=True)
        mask = mask.cuda(non_blocking=True)

        with torch.autocast("cuda", dtype=torch.float16, enabled=config.ENABLE_AMP):
            loss = model(img, mask)

        if config.TRAIN.ACCUMULATION_STEPS > 1:
            scaler.scale(loss / config.TRAIN.ACCUMULATION_STEPS).backward()
            scaler.unscale_(optimizer)  # <- here
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), config.TRAIN.CLIP_GRAD)
            if (idx + 1) % config.TRAIN.ACCUMULATION_STEPS == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
        else:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            grad_norm = get_grad_norm(model.parameters())
            scaler.step(optimizer)
            scaler.update()

        loss_meter.update(loss.item(), img.size(0))
        norm_meter.update(grad_norm)
        scale_meter.update(scaler.get_scale())
    print(f"epoch {epoch} loss {loss_meter.avg:.4f} norm {norm_meter.avg:.3f} in {time.time() - start:.0f}s")
