# source: TorchSSL/TorchSSL#59
# mistake: clip_grad_norm_ is called before the gradients are unscaled, so the threshold is compared with scaled gradients
# severity: error
from contextlib import nullcontext
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch.cuda.amp import GradScaler, autocast


@dataclass
class SslConfig:
    lr: float = 0.03
    momentum: float = 0.9
    clip: float = 1.0
    use_amp: bool = True
    threshold: float = 0.95
    lambda_u: float = 1.0
    steps: int = 2 ** 20


class PseudoLabelRunner:
    def __init__(self, net, cfg: SslConfig, device="cuda"):
        self.net = net.to(device)
        self.cfg = cfg
        self.device = device
        self.opt = torch.optim.SGD(net.parameters(), lr=cfg.lr, momentum=cfg.momentum, nesterov=True)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, T_max=cfg.steps)
        self.scaler = GradScaler(enabled=cfg.use_amp)
        self.ctx = autocast if cfg.use_amp else nullcontext

    def consistency(self, weak, strong):
        with torch.no_grad():
            probs = torch.softmax(weak.float(), dim=-1)
            conf, pseudo = probs.max(-1)
            mask = (conf >= self.cfg.threshold).float()
        return (F.cross_entropy(strong, pseudo, reduction="none") * mask).mean()

    def forward_losses(self, xl, yl, xw, xs):
        n = xl.size(0)
        with self.ctx():
            out = self.net(torch.cat([xl, xw, xs]))
            weak, strong = out[n:].chunk(2)
            sup = F.cross_entropy(out[:n], yl)
            unsup = self.consistency(weak, strong)
            return sup + self.cfg.lambda_u * unsup

    def apply(self, loss):
        if self.cfg.use_amp:
            self.scaler.scale(loss).backward()
            if self.cfg.clip > 0:
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg.clip)  # <- here
            self.scaler.step(self.opt)
            self.scaler.update()
        else:
            loss.backward()
            if self.cfg.clip > 0:
                torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg.clip)
            self.opt.step()
        self.sched.step()
        self.net.zero_grad()

    def fit(self, labelled, unlabelled):
        self.net.train()
        for step, ((xl, yl), (xw, xs)) in enumerate(zip(labelled, unlabelled)):
            batch = [t.to(self.device, non_blocking=True) for t in (xl, yl, xw, xs)]
            loss = self.forward_losses(*batch)
            self.apply(loss)
            if step % 100 == 0:
                print(f"step {step} loss {loss.item():.4f}")
            if step >= self.cfg.steps:
                break
