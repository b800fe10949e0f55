# source: https://github.com/IAHispano/Applio/pull/860
# mistake: optimizer.step() is called again after scaler.step(), which applies every update twice and bypasses the skipping of steps with inf gradients
# severity: error
import itertools

import torch
import torch.nn.functional as F
from torch.cuda.amp import autocast


def hinge_d(real, fake):
    return F.relu(1 - real.float()).mean() + F.relu(1 + fake.float()).mean()


def train_one_epoch(loader, nets, optims, scaler, mel_fn, weights, log, device):
    gen, disc = nets
    opt_g, opt_d = optims
    gen.train()
    disc.train()
    for step, (mel, wav) in enumerate(loader):
        mel = mel.to(device, non_blocking=True)
        wav = wav.to(device, non_blocking=True)

        with autocast():
            fake = gen(mel)

        with autocast():
            score_real = disc(wav)
            score_fake = disc(fake.detach())
            loss_d = hinge_d(score_real, score_fake)
        opt_d.zero_grad()
        scaler.scale(loss_d).backward()
        scaler.unscale_(opt_d)
        torch.nn.utils.clip_grad_value_(disc.parameters(), 10.0)
        scaler.step(opt_d)
        opt_d.step()  # <- here

        with autocast():
            adv = -disc(fake).float().mean()
        with autocast(enabled=False):
            rec = F.l1_loss(mel_fn(fake.float()), mel.float())
            loss_g = adv + weights["mel"] * rec
        opt_g.zero_grad()
        scaler.scale(loss_g).backward()
        scaler.unscale_(opt_g)
        torch.nn.utils.clip_grad_value_(gen.parameters(), 10.0)
        scaler.step(opt_g)
        opt_g.step()  # <- here
        scaler.update()

        if step % 100 == 0:
            log(step, d=loss_d.item(), adv=adv.item(), mel=rec.item())


def build(gen_cls, disc_cls, cfg, device):
    gen, disc = gen_cls(**cfg["gen"]).to(device), disc_cls(**cfg["disc"]).to(device)
    opt_g = torch.optim.AdamW(gen.parameters(), lr=cfg["lr"], betas=(0.8, 0.99))
    opt_d = torch.optim.AdamW(disc.parameters(), lr=cfg["lr"], betas=(0.8, 0.99))
    return (gen, disc), (opt_g, opt_d)


def fit(gen_cls, disc_cls, loader, mel_fn, cfg, device="cuda"):
    nets, optims = build(gen_cls, disc_cls, cfg, device)
    scaler = torch.cuda.amp.GradScaler()
    decays = [torch.optim.lr_scheduler.ExponentialLR(o, gamma=0.999) for o in optims]

    def log(step, **kw):
        print(step, " ".join(f"{k}={v:.4f}" for k, v in kw.items()))

    for epoch in itertools.count():
        if epoch == cfg["epochs"]:
            break
        train_one_epoch(loader, nets, optims, scaler, mel_fn, {"mel": 45.0}, log, device)
        for d in decays:
            d.step()
    torch.save(nets[0].state_dict(), cfg["out"])
