# source: facebookresearch/fairchem pull request #617
# mistake: the reported loss is the scaled loss divided by scaler.get_scale() after update() may have changed the scale, so it is off by the growth or backoff factor (and the plateau scheduler works with it)
# severity: warning
import logging

import torch
from torch.amp import GradScaler

LOG = logging.getLogger(__name__)


class Meter(dict):
    def push(self, **values):
        for k, v in values.items():
            total, n = self.get(k, (0.0, 0))
            self[k] = (total + float(v), n + 1)

    def means(self):
        return {k: t / max(n, 1) for k, (t, n) in self.items()}


class ForceTask:
    """Energies and forces of slabs with adsorbates; forces are predicted directly."""

    def __init__(self, net, normalizers, cfg, device="cuda"):
        self.net = net.to(device)
        self.normalizers = normalizers
        self.cfg = cfg
        self.device = device
        self.opt = torch.optim.AdamW(net.parameters(), lr=cfg["lr"], amsgrad=True)
        self.plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(self.opt, factor=0.8, patience=3)
        self.scaler = GradScaler("cuda") if cfg.get("amp") else None
        self.epoch = 0

    def _forward(self, batch):
        with torch.autocast("cuda", enabled=self.scaler is not None):
            out = self.net(batch)
        return {k: v.float() for k, v in out.items()}

    def _loss(self, out, batch):
        e = self.normalizers["energy"](batch["energy"])
        f = self.normalizers["forces"](batch["forces"])
        free = ~batch["fixed"]
        energy = (out["energy"] - e).abs().mean()
        forces = torch.linalg.vector_norm(out["forces"][free] - f[free], dim=-1).mean()
        return self.cfg["w_energy"] * energy + self.cfg["w_forces"] * forces

    def _update(self, loss):
        self.opt.zero_grad(set_to_none=True)
        loss.backward()
        if self.scaler:
            self.scaler.unscale_(self.opt)
        if self.cfg.get("clip"):
            torch.nn.utils.clip_grad_norm_(self.net.parameters(), self.cfg["clip"])
        if self.scaler:
            self.scaler.step(self.opt)
            self.scaler.update()
        else:
            self.opt.step()

    def train_epoch(self, loader):
        self.net.train()
        meter = Meter()
        for i, batch in enumerate(loader):
            batch = {k: v.to(self.device, non_blocking=True) for k, v in batch.items()}
            loss = self._loss(self._forward(batch), batch)
            if self.scaler:
                loss = self.scaler.scale(loss)
            self._update(loss)
            factor = self.scaler.get_scale() if self.scaler else 1.0  # <- here
            meter.push(loss=loss.item() / factor)  # <- here
            if i % 100 == 0:
                LOG.info("%d/%d %s", self.epoch, i, meter.means())
        self.plateau.step(meter.means()["loss"])
        self.epoch += 1
        return meter.means()

    def save(self, path):
        torch.save({
            "net": self.net.state_dict(),
            "opt": self.opt.state_dict(),
            "plateau": self.plateau.state_dict(),
            "scaler": self.scaler.state_dict() if self.scaler else None,
            "epoch": self.epoch,
        }, path)

    def load(self, path):
        blob = torch.load(path, map_location=self.device)
        self.net.load_state_dict(blob["net"])
        self.opt.load_state_dict(blob["opt"])
        self.plateau.load_state_dict(blob["plateau"])
        if self.scaler and blob["scaler"]:
            self.scaler.load_state_dict(blob["scaler"])
        self.epoch = blob["epoch"]
