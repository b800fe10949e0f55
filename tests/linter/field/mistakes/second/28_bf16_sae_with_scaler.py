"""
# source: https://github.com/decoderesearch/SAELens/pull/723
# mistake: all computation is bfloat16, where loss scaling does nothing useful, yet each step goes through a GradScaler; with a bfloat16 SAE unscale_ is not implemented and raises.
# severity: error
# torch: any
"""
import contextlib
from dataclasses import dataclass

import torch
from torch import nn


@dataclass
class SAEConfig:
    d_in: int = 768
    d_sae: int = 24576
    l1: float = 5.0
    lr: float = 3e-4
    autocast: bool = True
    total_steps: int = 30_000


class TrainingSAE(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.W_enc = nn.Parameter(torch.randn(cfg.d_in, cfg.d_sae) / cfg.d_in**0.5)
        self.W_dec = nn.Parameter(self.W_enc.detach().t().clone())
        self.b_enc = nn.Parameter(torch.zeros(cfg.d_sae))
        self.b_dec = nn.Parameter(torch.zeros(cfg.d_in))
        self.l1 = cfg.l1

    def training_forward(self, x):
        acts = torch.relu((x - self.b_dec) @ self.W_enc + self.b_enc)
        recon = acts @ self.W_dec + self.b_dec
        mse = (recon.float() - x.float()).pow(2).sum(-1).mean()
        return mse + self.l1 * (acts.float() * self.W_dec.float().norm(dim=1)).sum(-1).mean()


class SAETrainer:
    def __init__(self, cfg, sae, data_provider):
        self.cfg = cfg
        self.sae = sae
        self.data_provider = data_provider
        self.optimizer = torch.optim.Adam(sae.parameters(), lr=cfg.lr, betas=(0.9, 0.999))
        self.grad_scaler = torch.amp.GradScaler("cuda", enabled=cfg.autocast)  # <- here
        self.autocast_if_enabled = (
            torch.autocast("cuda", dtype=torch.bfloat16) if cfg.autocast else contextlib.nullcontext()
        )

    def train_step(self, acts):
        self.sae.train()
        with self.autocast_if_enabled:
            loss = self.sae.training_forward(acts)
        self.grad_scaler.scale(loss).backward()
        self.grad_scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.sae.parameters(), 1.0)
        self.grad_scaler.step(self.optimizer)
        self.grad_scaler.update()
        self.optimizer.zero_grad()
        return loss.item()

    def fit(self):
        for step in range(self.cfg.total_steps):
            value = self.train_step(next(self.data_provider).to("cuda", torch.bfloat16))
            if step % 200 == 0:
                print(step, value)


def main(data_provider):
    cfg = SAEConfig()
    sae = TrainingSAE(cfg).to("cuda", dtype=torch.bfloat16)
    SAETrainer(cfg, sae, data_provider).fit()
