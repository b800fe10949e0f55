# source: https://github.com/Haian-Jin/LVSM/pull/19
# mistake: when the norm guard skips the step, scaler.update() is skipped too, so the next unscale_ raises "already been called since the last update()"
# severity: error
import logging

import torch
import torch.nn.functional as F
from torch.optim.lr_scheduler import LambdaLR

log = logging.getLogger("nvs")


def psnr(a, b):
    return -10 * torch.log10(F.mse_loss(a.float(), b.float()).clamp(min=1e-8))


def make_schedule(opt, warm, total):
    def factor(i):
        return min(1.0, (i + 1) / warm) * max(0.0, 1 - i / total)
    return LambdaLR(opt, factor)


def forward_loss(model, perceptual, batch, weight):
    pred = model(batch["src_rgb"], batch["src_rays"], batch["tgt_rays"])
    l2 = F.mse_loss(pred.float(), batch["tgt_rgb"])
    lp = perceptual(pred, batch["tgt_rgb"]).mean()
    return l2 + weight * lp, psnr(pred.detach(), batch["tgt_rgb"])


def train(model, perceptual, batches, cfg):
    opt = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.05)
    sched = make_schedule(opt, cfg.warmup, cfg.iters)
    scaler = torch.amp.GradScaler("cuda")
    params = [p for p in model.parameters() if p.requires_grad]
    model.train()

    for it, batch in zip(range(cfg.iters), batches):
        batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss, quality = forward_loss(model, perceptual, batch, cfg.lpips_weight)
        scaler.scale(loss).backward()

        scaler.unscale_(opt)  # <- here
        norm = torch.nn.utils.clip_grad_norm_(params, cfg.clip).item()
        if it > cfg.warmup and norm > cfg.skip_above:  # <- here
            log.warning("iter %d: gradient norm %.2f, not stepping", it, norm)
            continue  # <- here

        scaler.step(opt)
        scaler.update()
        sched.step()
        if it % 50 == 0:
            log.info("iter %d loss %.4f psnr %.2f norm %.3f", it, loss.item(), quality.item(), norm)

    return model
