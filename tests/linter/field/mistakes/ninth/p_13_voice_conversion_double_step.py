# source: IAHispano/Applio#860
# mistake: after scaler.step(opt) the optimizers are stepped once more by hand, so every update is applied twice and overflow skipping is bypassed
# severity: error
import json
import sys

import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast
from torch.nn.utils import clip_grad_norm_


def feature_matching(real, fake):
    return sum(F.l1_loss(f.float(), r.float().detach()) for r, f in zip(real, fake))


def disc_loss(real, fake):
    return sum(((1 - r.float()) ** 2).mean() + (f.float() ** 2).mean() for r, f in zip(real, fake))


def gen_loss(fake):
    return sum(((1 - f.float()) ** 2).mean() for f in fake)


def train_and_evaluate(hps, epoch, nets, optims, loaders, scalers, writer=None):
    net_g, net_d = nets
    optim_g, optim_d = optims
    scaler_g, scaler_d = scalers
    train_loader, _ = loaders
    net_g.train()
    net_d.train()
    for i, (phone, pitch, wave, mel) in enumerate(train_loader):
        phone, pitch = phone.cuda(non_blocking=True), pitch.cuda(non_blocking=True)
        wave, mel = wave.cuda(non_blocking=True), mel.cuda(non_blocking=True)

        with autocast("cuda", dtype=torch.float16, enabled=hps["fp16_run"]):
            y_hat, mel_hat = net_g(phone, pitch)
            score_r, score_f, _, _ = net_d(wave, y_hat.detach())
        loss_d = disc_loss(score_r, score_f)
        optim_d.zero_grad()
        scaler_d.scale(loss_d).backward()
        scaler_d.unscale_(optim_d)
        gn_d = clip_grad_norm_(net_d.parameters(), 1000.0)
        scaler_d.step(optim_d)
        scaler_d.update()

        with autocast("cuda", dtype=torch.float16, enabled=hps["fp16_run"]):
            _, score_f, fmap_r, fmap_f = net_d(wave, y_hat)
        loss_mel = F.l1_loss(mel_hat.float(), mel) * hps["c_mel"]
        loss_g = gen_loss(score_f) + feature_matching(fmap_r, fmap_f) + loss_mel
        optim_g.zero_grad()
        scaler_g.scale(loss_g).backward()
        scaler_g.unscale_(optim_g)
        gn_g = clip_grad_norm_(net_g.parameters(), 1000.0)
        scaler_g.step(optim_g)
        scaler_g.update()

        optim_g.step()  # <- here
        optim_d.step()  # <- here

        if writer is not None and i % hps["log_interval"] == 0:
            writer.add_scalar("d", loss_d.item(), epoch * len(train_loader) + i)
            writer.add_scalar("g", loss_g.item(), epoch * len(train_loader) + i)
            writer.add_scalar("grad/g", float(gn_g))
            writer.add_scalar("grad/d", float(gn_d))


def main():
    hps = json.load(open(sys.argv[1]))
    from voice.models import MultiPeriod, Synth
    from voice.data import build_loaders

    net_g, net_d = Synth(**hps["model"]).cuda(), MultiPeriod().cuda()
    optim_g = torch.optim.AdamW(net_g.parameters(), hps["lr"], betas=(0.8, 0.99), eps=1e-9)
    optim_d = torch.optim.AdamW(net_d.parameters(), hps["lr"], betas=(0.8, 0.99), eps=1e-9)
    sch = [torch.optim.lr_scheduler.ExponentialLR(o, hps["decay"]) for o in (optim_g, optim_d)]
    scalers = [GradScaler("cuda", enabled=hps["fp16_run"]) for _ in range(2)]
    loaders = build_loaders(hps)
    for epoch in range(hps["epochs"]):
        train_and_evaluate(hps, epoch, (net_g, net_d), (optim_g, optim_d), loaders, scalers)
        for s in sch:
            s.step()


if __name__ == "__main__":
    main()
