# source: microsoft/Swin-Transformer#311
# mistake: unscale_ runs on every micro-batch while step/update run only at the end of the accumulation window; the second unscale_ raises
# severity: error
import logging

import torch
from torch.nn.utils import clip_grad_norm_

log = logging.getLogger("mim")


def grad_norm(params):
    norms = [p.grad.detach().norm(2) for p in params if p.grad is not None]
    return torch.linalg.vector_norm(torch.stack(norms)) if norms else torch.tensor(0.0)


def pretrain_epoch(cfg, model, loader, optimizer, schedule, scaler, epoch):
    model.train()
    optimizer.zero_grad()
    n_steps = len(loader)
    accum = cfg.accumulation_steps
    for idx, (img, mask) in enumerate(loader):
        img = img.cuda(non_blocking=True)
        mask = mask.cuda(non_blocking=True)

        with torch.autocast("cuda", dtype=torch.float16, enabled=cfg.amp):
            loss = model(img, mask)

        if accum > 1:
            loss = loss / accum
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)  # <- here
            if cfg.clip_grad:
                norm = clip_grad_norm_(model.parameters(), cfg.clip_grad)
            else:
                norm = grad_norm(model.parameters())
            if (idx + 1) % accum == 0:
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad()
                schedule.step_update(epoch * n_steps + idx)
        else:
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            if cfg.clip_grad:
                norm = clip_grad_norm_(model.parameters(), cfg.clip_grad)
            else:
                norm = grad_norm(model.parameters())
            scaler.step(optimizer)
            scaler.update()
            schedule.step_update(epoch * n_steps + idx)

        if idx % cfg.print_freq == 0:
            log.info("[%d][%d/%d] loss %.4f norm %.3f scale %.0f", epoch, idx, n_steps,
                     loss.item() * accum, float(norm), scaler.get_scale())


def run(cfg, model, loader, schedule_cls):
    model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.base_lr, weight_decay=cfg.wd)
    schedule = schedule_cls(optimizer, cfg.epochs * len(loader) // cfg.accumulation_steps)
    scaler = torch.amp.GradScaler("cuda", enabled=cfg.amp)
    for epoch in range(cfg.epochs):
        loader.sampler.set_epoch(epoch)
        pretrain_epoch(cfg, model, loader, optimizer, schedule, scaler, epoch)
        if epoch % cfg.save_every == 0:
            torch.save(dict(model=model.state_dict(), optimizer=optimizer.state_dict(),
                            scaler=scaler.state_dict(), epoch=epoch), f"{cfg.out}/ck{epoch}.pth")
