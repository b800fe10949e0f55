# source: https://github.com/microsoft/Swin-Transformer/issues/311
# mistake: scaler.unscale_ runs after every micro-batch although step/update run only every `accumulate` ones (RuntimeError: unscale_() has already been called since the last update)
# severity: error
import datetime
import logging
import time

import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast

log = logging.getLogger("mim")


class MaskedPixels(nn.Module):
    def __init__(self, encoder, dim=768, patch=16):
        super().__init__()
        self.encoder, self.patch = encoder, patch
        self.token = nn.Parameter(torch.zeros(1, 1, dim))
        self.decoder = nn.Linear(dim, 3 * patch * patch)

    def forward(self, img, mask):
        feats = self.encoder(img, mask, self.token)
        rec = self.decoder(feats)
        p = self.patch
        b, _, h, w = img.shape
        tgt = img.view(b, 3, h // p, p, w // p, p).permute(0, 2, 4, 1, 3, 5).reshape(b, -1, 3 * p * p)
        err = F.l1_loss(rec.float(), tgt.float(), reduction="none").mean(-1)
        return (err * mask).sum() / mask.sum().clamp(min=1)


def pretrain_epoch(cfg, model, loader, optimizer, lr_at, scaler, epoch):
    model.train()
    optimizer.zero_grad()
    n = len(loader)
    start = time.time()
    norm = torch.zeros(())
    for i, (img, mask) in enumerate(loader):
        img = img.cuda(non_blocking=True)
        mask = mask.cuda(non_blocking=True).float().flatten(1)
        with autocast(enabled=cfg.amp):
            loss = model(img, mask)
        scaler.scale(loss / cfg.accumulate).backward()
        scaler.unscale_(optimizer)  # <- here
        norm = nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        if (i + 1) % cfg.accumulate == 0:  # <- here
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            for g in optimizer.param_groups:
                g["lr"] = lr_at(epoch * n + i)
        if i % cfg.print_every == 0:
            left = datetime.timedelta(seconds=int((time.time() - start) / (i + 1) * (n - i)))
            log.info("ep %d [%d/%d] loss %.4f norm %.3f scale %.0f eta %s", epoch, i, n,
                     loss.item(), norm.item(), scaler.get_scale(), left)


def pretrain(cfg, encoder, loader, lr_at):
    model = MaskedPixels(encoder).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.05)
    scaler = GradScaler(enabled=cfg.amp)
    for epoch in range(cfg.epochs):
        pretrain_epoch(cfg, model, loader, optimizer, lr_at, scaler, epoch)
        torch.save(
            {"model": model.state_dict(), "optimizer": optimizer.state_dict(),
             "scaler": scaler.state_dict(), "epoch": epoch},
            f"{cfg.out}/mim_{epoch:04d}.pth",
        )
