# source: IAHispano/Applio PR #860
# mistake: after scaler.step() both optimizers are stepped again directly, so each update is applied twice and overflowed gradients are applied unchecked
# severity: error
import json
import sys

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.nn import functional as F
from torch.nn.utils import clip_grad_value_


def disc_loss(real_logits, fake_logits):
    total = 0.0
    for r, f in zip(real_logits, fake_logits):
        total = total + ((1 - r.float()) ** 2).mean() + (f.float() ** 2).mean()
    return total


def adv_loss(fake_logits):
    return sum(((1 - f.float()) ** 2).mean() for f in fake_logits)


def feature_loss(real_maps, fake_maps):
    out = 0.0
    for r, f in zip(real_maps, fake_maps):
        out = out + (r.float().detach() - f.float()).abs().mean()
    return 2.0 * out


class Session:
    def __init__(self, hps, net_g: nn.Module, net_d: nn.Module, mel):
        self.hps = hps
        self.net_g, self.net_d, self.mel = net_g.cuda(), net_d.cuda(), mel
        self.optim_g = torch.optim.AdamW(net_g.parameters(), hps["lr"], betas=(0.8, 0.99), eps=1e-9)
        self.optim_d = torch.optim.AdamW(net_d.parameters(), hps["lr"], betas=(0.8, 0.99), eps=1e-9)
        self.scaler = GradScaler(enabled=hps["fp16_run"])
        self.fp16 = hps["fp16_run"]

    def discriminator_phase(self, wave, fake):
        with autocast(enabled=self.fp16):
            real_out, _ = self.net_d(wave)
            fake_out, _ = self.net_d(fake.detach())
        with autocast(enabled=False):
            loss = disc_loss(real_out, fake_out)
        self.optim_d.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optim_d)
        clip_grad_value_(self.net_d.parameters(), 100.0)
        self.scaler.step(self.optim_d)
        self.optim_d.step()  # <- here
        return loss.detach()

    def generator_phase(self, wave, fake):
        with autocast(enabled=self.fp16):
            fake_out, fake_maps = self.net_d(fake)
            with torch.no_grad():
                _, real_maps = self.net_d(wave)
        with autocast(enabled=False):
            l_mel = F.l1_loss(self.mel(fake.float()), self.mel(wave.float())) * self.hps["c_mel"]
            loss = adv_loss(fake_out) + feature_loss(real_maps, fake_maps) + l_mel
        self.optim_g.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optim_g)
        clip_grad_value_(self.net_g.parameters(), 100.0)
        self.scaler.step(self.optim_g)
        self.optim_g.step()  # <- here
        self.scaler.update()
        return loss.detach()

    def epoch(self, loader):
        for units, pitch, wave in loader:
            units, pitch, wave = units.cuda(), pitch.cuda(), wave.cuda()
            with autocast(enabled=self.fp16):
                fake = self.net_g(units, pitch)
            d = self.discriminator_phase(wave, fake)
            g = self.generator_phase(wave, fake)
        print(f"d {d:.3f} g {g:.3f}")


if __name__ == "__main__":
    from vc.models import Discriminator, Generator, LogMel, batches

    hps = json.load(open(sys.argv[1]))
    session = Session(hps, Generator(hps), Discriminator(), LogMel(hps).cuda())
    for _ in range(hps["epochs"]):
        session.epoch(batches(hps))
