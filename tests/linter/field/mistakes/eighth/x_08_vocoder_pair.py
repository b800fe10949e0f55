# source: IAHispano/Applio PR #860
# mistake: the optimizers are stepped by hand besides scaler.step, a second update, which ignores the inf check (and may use infinite gradients)
# severity: error
import itertools
import json
import logging

import torch
from torch.cuda.amp import GradScaler, autocast
from torch.nn import functional as F

from vocoder.losses import adversarial_d, adversarial_g, feature_match
from vocoder.mel import log_mel
from vocoder.nets import Generator, MultiPeriod, MultiScale
from vocoder.segments import segment_loader

log = logging.getLogger(__name__)


class Session:
    """Everything that changes while training."""

    def __init__(self, hps):
        self.hps = hps
        self.gen = Generator(**hps["generator"]).cuda()
        self.mpd = MultiPeriod().cuda()
        self.msd = MultiScale().cuda()
        self.optim_g = torch.optim.AdamW(self.gen.parameters(), hps["lr"], betas=(0.8, 0.99))
        self.optim_d = torch.optim.AdamW(
            itertools.chain(self.mpd.parameters(), self.msd.parameters()), hps["lr"], betas=(0.8, 0.99)
        )
        self.scaler = GradScaler(enabled=hps["fp16"])
        self.step = 0

    def critics(self, audio):
        outs = [self.mpd(audio), self.msd(audio)]
        scores = [s for o in outs for s in o[0]]
        feats = [f for o in outs for f in o[1]]
        return scores, feats


def train_discriminators(s, real, fake):
    with autocast(enabled=s.hps["fp16"]):
        r, _ = s.critics(real)
        f, _ = s.critics(fake.detach())
    loss = adversarial_d([x.float() for x in r], [x.float() for x in f])
    s.optim_d.zero_grad()
    s.scaler.scale(loss).backward()
    s.scaler.step(s.optim_d)  # <- here
    s.optim_d.step()  # <- here
    return loss


def train_generator(s, real, fake, mel):
    with autocast(enabled=s.hps["fp16"]):
        _, fr = s.critics(real)
        sf, ff = s.critics(fake)
    mel_loss = 45 * F.l1_loss(log_mel(fake.float().squeeze(1)), mel)
    loss = mel_loss + adversarial_g([x.float() for x in sf]) + 2 * feature_match(fr, ff)
    s.optim_g.zero_grad()
    s.scaler.scale(loss).backward()
    s.scaler.step(s.optim_g)  # <- here
    s.optim_g.step()  # <- here
    return loss, mel_loss


def main():
    hps = json.load(open("vocoder.json"))
    s = Session(hps)
    loader = segment_loader(hps["filelist"], hps["segment"], hps["batch"])
    for epoch in range(hps["epochs"]):
        for mel, audio in loader:
            mel, audio = mel.cuda(), audio.cuda()
            with autocast(enabled=hps["fp16"]):
                fake = s.gen(mel)
            d = train_discriminators(s, audio, fake)
            g, m = train_generator(s, audio, fake, mel)
            s.scaler.update()
            s.step += 1
            if s.step % 200 == 0:
                log.info("%d d=%.3f g=%.3f mel=%.3f", s.step, d.item(), g.item(), m.item())
        torch.save(s.gen.state_dict(), f"gen_{epoch:04d}.pth")


if __name__ == "__main__":
    main()
