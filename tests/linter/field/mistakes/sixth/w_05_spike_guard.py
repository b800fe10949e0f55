# source: Haian-Jin/LVSM pull request #19
# mistake: when the gradient norm is too large the batch is skipped after unscale_ without scaler.update(), so the next unscale_ raises "unscale_() has already been called"
# severity: error
import collections
import logging

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP

log = logging.getLogger("relight")


class SpikeGuard:
    """Remembers recent gradient norms and tells outliers apart."""

    def __init__(self, window=200, factor=6.0, hard=50.0):
        self.norms = collections.deque(maxlen=window)
        self.factor = factor
        self.hard = hard

    def is_spike(self, value: float) -> bool:
        if value > self.hard:
            return True
        if len(self.norms) < 20:
            self.norms.append(value)
            return False
        median = sorted(self.norms)[len(self.norms) // 2]
        if value > self.factor * median:
            return True
        self.norms.append(value)
        return False


class RelightTrainer:
    def __init__(self, net: nn.Module, perceptual: nn.Module, loader, cfg, rank: int):
        self.rank = rank
        self.cfg = cfg
        self.loader = loader
        self.net = DDP(net.to(rank), device_ids=[rank])
        self.perceptual = perceptual.to(rank).eval().requires_grad_(False)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=cfg["lr"], betas=(0.9, 0.95))
        self.warm = torch.optim.lr_scheduler.LinearLR(self.opt, 0.01, total_iters=cfg["warmup"])
        self.scaler = torch.amp.GradScaler("cuda", enabled=cfg["precision"] == "fp16")
        self.guard = SpikeGuard()
        self.step = 0
        self.skipped = 0

    @property
    def ctx(self):
        dt = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(self.cfg["precision"])
        return torch.autocast("cuda", dtype=dt, enabled=dt is not None)

    def losses(self, batch):
        with self.ctx:
            out = self.net(batch["image"], batch["light"])
            mse = nn.functional.mse_loss(out.float(), batch["target"])
            feat = self.perceptual(out, batch["target"]).mean()
        return mse + self.cfg["w_feat"] * feat.float(), mse.detach()

    def run_epoch(self):
        self.net.train()
        for batch in self.loader:
            batch = {k: v.to(self.rank, non_blocking=True) for k, v in batch.items()}
            self.opt.zero_grad(set_to_none=True)
            loss, mse = self.losses(batch)
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.opt)  # <- here
            norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg["clip"]).item()

            if torch.isfinite(torch.tensor(norm)) and self.guard.is_spike(norm):  # <- here
                self.skipped += 1
                log.warning("step %d: gradient norm %.2f, batch ignored", self.step, norm)
                continue  # <- here

            self.scaler.step(self.opt)
            self.scaler.update()
            self.warm.step()
            self.step += 1
            if self.rank == 0 and self.step % 20 == 0:
                log.info("step %d mse %.4f norm %.3f skipped %d", self.step, mse.item(), norm, self.skipped)

    def state_dict(self):
        return dict(net=self.net.module.state_dict(), opt=self.opt.state_dict(),
                    warm=self.warm.state_dict(), scaler=self.scaler.state_dict(), step=self.step)

    def load_state_dict(self, sd):
        self.net.module.load_state_dict(sd["net"])
        self.opt.load_state_dict(sd["opt"])
        self.warm.load_state_dict(sd["warm"])
        self.scaler.load_state_dict(sd["scaler"])
        self.step = sd["step"]
