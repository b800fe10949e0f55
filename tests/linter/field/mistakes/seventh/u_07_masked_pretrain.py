# source: https://github.com/microsoft/Swin-Transformer/issues/311
# mistake: unscale_ runs after every micro-batch but step/update only every N-th, so the second micro-batch raises "unscale_() has already been called"
# severity: error
import time

import torch
from torch import nn
from torch.cuda import amp


def patch_mask(batch, patches, ratio, device):
    keep = int(patches * (1 - ratio))
    order = torch.rand(batch, patches, device=device).argsort(dim=1)
    mask = torch.ones(batch, patches, device=device)
    mask.scatter_(1, order[:, :keep], 0)
    return mask


def recon_loss(pred, target, mask):
    err = (pred.float() - target).abs().mean(dim=-1)
    return (err * mask).sum() / (mask.sum() + 1e-5)


def train_one_epoch(cfg, model, loader, optimizer, epoch, lr_scheduler, scaler):
    model.train()
    optimizer.zero_grad()
    n_iter = len(loader)
    start = time.time()
    norm = torch.zeros(())
    for idx, patches in enumerate(loader):
        patches = patches.cuda(non_blocking=True)
        mask = patch_mask(patches.size(0), patches.size(1), cfg.mask_ratio, patches.device)
        with amp.autocast(enabled=cfg.amp):
            pred = model(patches, mask)
        loss = recon_loss(pred, patches, mask) / cfg.accum

        scaler.scale(loss).backward()
        if cfg.clip_grad:
            scaler.unscale_(optimizer)  # <- here
            norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip_grad)  # <- here
        if (idx + 1) % cfg.accum == 0 or idx + 1 == n_iter:
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            lr_scheduler.step_update((epoch * n_iter + idx) // cfg.accum)

        if idx % cfg.print_freq == 0:
            print(
                f"[{epoch}][{idx}/{n_iter}] loss {loss.item() * cfg.accum:.4f} "
                f"norm {norm.item():.3f} scale {scaler.get_scale():.0f}"
            )
    print(f"epoch {epoch} took {time.time() - start:.0f}s")


def run(cfg, model, loader, lr_scheduler_factory):
    model = model.cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.05)
    lr_scheduler = lr_scheduler_factory(optimizer)
    scaler = amp.GradScaler(enabled=cfg.amp)
    for epoch in range(cfg.epochs):
        train_one_epoch(cfg, model, loader, optimizer, epoch, lr_scheduler, scaler)
        torch.save(
            dict(model=model.state_dict(), optimizer=optimizer.state_dict(), scaler=scaler.state_dict(), epoch=epoch),
            f"{cfg.output}/ckpt_{epoch}.pth",
        )
