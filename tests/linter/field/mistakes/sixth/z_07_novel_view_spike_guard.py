# source: Haian-Jin/LVSM PR #19
# mistake: when the spike guard rejects a step, update() is left out as well, so the next unscale_() raises RuntimeError
# severity: error
import logging
import math

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

logger = logging.getLogger(__name__)


class SpikeGuard:
    """Rejects steps whose gradient norm exceeds `limit` once the run is warmed up."""

    def __init__(self, limit, after):
        self.limit, self.after, self.rejected = limit, after, 0

    def accepts(self, norm, step):
        if step < self.after or (math.isfinite(norm) and norm <= self.limit):
            return True
        self.rejected += 1
        return False


def photometric(rendered, target, perceptual=None):
    mse = torch.nn.functional.mse_loss(rendered, target)
    extra = perceptual(rendered, target) if perceptual is not None else 0.0
    return mse + 0.5 * extra, -10.0 * torch.log10(mse.detach().float())


def optimise(model, loader, optimizer, schedule, scaler, guard, cfg, perceptual=None):
    step = forward_step = 0
    params = [p for p in model.parameters() if p.requires_grad]
    for batch in loader:
        cams = batch["rays"].cuda(non_blocking=True)
        src, tgt = batch["input"].cuda(), batch["target"].cuda()
        with torch.autocast("cuda", enabled=cfg.use_amp, dtype=torch.float16):
            pred = model(src, cams)
            loss, psnr = photometric(pred, tgt, perceptual)
        optimizer.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        forward_step += 1

        scaler.unscale_(optimizer)
        norm = torch.nn.utils.clip_grad_norm_(params, cfg.grad_clip).item()
        if guard.accepts(norm, step):  # <- here
            scaler.step(optimizer)
            scaler.update()  # <- here
            schedule.step()
            step += 1
        else:
            logger.warning("norm %.2f over %.2f, step skipped", norm, guard.limit)  # <- here

        if dist.get_rank() == 0 and forward_step % 50 == 0:
            logger.info("fwd %d upd %d loss %.4f psnr %.2f", forward_step, step, loss.item(), psnr.item())
        if step >= cfg.max_steps:
            break
    return step


def main(cfg, make_model, make_loader):
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % torch.cuda.device_count())
    model = DistributedDataParallel(make_model(cfg).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, cfg.max_steps)
    scaler = torch.amp.GradScaler("cuda", enabled=cfg.use_amp)
    guard = SpikeGuard(limit=cfg.reject_norm, after=1000)
    optimise(model, make_loader(cfg), optimizer, schedule, scaler, guard, cfg)
    dist.destroy_process_group()
