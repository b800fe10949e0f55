# source: https://github.com/IAHispano/Applio/pull/860
# mistake: after scaler.step the optimizers are stepped once more directly, so every update is applied twice and the overflow check is bypassed
# severity: error
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast


def d_loss(real_outs, fake_outs):
    return sum(((1 - r.float()) ** 2).mean() + (f.float() ** 2).mean() for r, f in zip(real_outs, fake_outs))


def g_loss(fake_outs):
    return sum(((1 - f.float()) ** 2).mean() for f in fake_outs)


def grads_of(net):
    return nn.utils.clip_grad_norm_(net.parameters(), 1e6)


def train_and_evaluate(hps, nets, optims, loader, scaler, mel_fn):
    net_g, net_d = nets
    optim_g, optim_d = optims
    net_g.train()
    net_d.train()

    for batch_idx, (phone, pitch, wave) in enumerate(loader):
        phone, pitch, wave = phone.cuda(), pitch.cuda(), wave.cuda()

        with autocast(enabled=hps.fp16):
            wave_hat = net_g(phone, pitch)
            real, fake = net_d(wave), net_d(wave_hat.detach())
        loss_disc = d_loss(real, fake)

        optim_d.zero_grad()
        scaler.scale(loss_disc).backward()
        scaler.unscale_(optim_d)
        norm_d = grads_of(net_d)
        scaler.step(optim_d)
        optim_d.step()  # <- here

        with autocast(enabled=hps.fp16):
            fake = net_d(wave_hat)
        mel_l1 = F.l1_loss(mel_fn(wave_hat.float()), mel_fn(wave))
        loss_gen = g_loss(fake) + hps.c_mel * mel_l1

        optim_g.zero_grad()
        scaler.scale(loss_gen).backward()
        scaler.unscale_(optim_g)
        norm_g = grads_of(net_g)
        scaler.step(optim_g)
        optim_g.step()  # <- here
        scaler.update()

        if batch_idx % hps.log_interval == 0:
            print(
                f"d {loss_disc.item():.3f} g {loss_gen.item():.3f} mel {mel_l1.item():.3f} "
                f"|d| {float(norm_d):.2f} |g| {float(norm_g):.2f}"
            )


def run(hps, net_g, net_d, loader, mel_fn):
    net_g, net_d = net_g.cuda(), net_d.cuda()
    optim_g = torch.optim.AdamW(net_g.parameters(), hps.lr, betas=(0.8, 0.99), eps=1e-9)
    optim_d = torch.optim.AdamW(net_d.parameters(), hps.lr, betas=(0.8, 0.99), eps=1e-9)
    sched_g = torch.optim.lr_scheduler.ExponentialLR(optim_g, hps.gamma)
    sched_d = torch.optim.lr_scheduler.ExponentialLR(optim_d, hps.gamma)
    scaler = GradScaler(enabled=hps.fp16)
    for epoch in range(hps.epochs):
        train_and_evaluate(hps, (net_g, net_d), (optim_g, optim_d), loader, scaler, mel_fn)
        sched_g.step()
        sched_d.step()
