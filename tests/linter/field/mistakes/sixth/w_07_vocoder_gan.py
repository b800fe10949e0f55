# source: IAHispano/Applio pull request #860
# mistake: after scaler.step() has stepped both optimizers, the end-of-batch helper calls their plain step() too, so every update is applied twice and skipped (inf) steps are applied after all
# severity: error
import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast


def hinge_d(real_maps, fake_maps):
    total = 0.0
    for r, f in zip(real_maps, fake_maps):
        total = total + F.relu(1.0 - r.float()).mean() + F.relu(1.0 + f.float()).mean()
    return total


def hinge_g(fake_maps):
    return sum(-f.float().mean() for f in fake_maps)


def spectral_l1(a, b, n_fft=1024, hop=256):
    win = torch.hann_window(n_fft, device=a.device)
    sa = torch.stft(a.float().squeeze(1), n_fft, hop, window=win, return_complex=True).abs()
    sb = torch.stft(b.float().squeeze(1), n_fft, hop, window=win, return_complex=True).abs()
    return F.l1_loss(torch.log(sa.clamp(min=1e-5)), torch.log(sb.clamp(min=1e-5)))


class EndOfBatch:
    """House-keeping that has to come after each batch."""

    def __init__(self, optimizers, schedulers, logger, every=25):
        self.optimizers = optimizers
        self.schedulers = schedulers
        self.logger = logger
        self.every = every
        self.count = 0

    def __call__(self, stats):
        for o in self.optimizers:
            o.step()  # <- here
        for s in self.schedulers:
            s.step()
        self.count += 1
        if self.count % self.every == 0:
            self.logger(self.count, {k: v.item() for k, v in stats.items()})


def train_vocoder(gen, disc, loader, epochs, logger, device="cuda", fp16=True):
    gen.to(device)
    disc.to(device)
    opt_g = torch.optim.AdamW(gen.parameters(), lr=2e-4, betas=(0.8, 0.99))
    opt_d = torch.optim.AdamW(disc.parameters(), lr=2e-4, betas=(0.8, 0.99))
    sch_g = torch.optim.lr_scheduler.ExponentialLR(opt_g, 0.99999)
    sch_d = torch.optim.lr_scheduler.ExponentialLR(opt_d, 0.99999)
    scaler = GradScaler("cuda", enabled=fp16)
    finish = EndOfBatch([opt_g, opt_d], [sch_g, sch_d], logger)

    for epoch in range(epochs):
        gen.train()
        disc.train()
        for mel, wav in loader:
            mel, wav = mel.to(device), wav.to(device)

            with autocast("cuda", enabled=fp16):
                fake = gen(mel)
                d_real = disc(wav)
                d_fake = disc(fake.detach())
            loss_d = hinge_d(d_real, d_fake)
            opt_d.zero_grad(set_to_none=True)
            scaler.scale(loss_d).backward()
            scaler.step(opt_d)

            disc.requires_grad_(False)
            with autocast("cuda", enabled=fp16):
                judged = disc(fake)
            loss_g = hinge_g(judged) + 45.0 * spectral_l1(fake, wav)
            opt_g.zero_grad(set_to_none=True)
            scaler.scale(loss_g).backward()
            scaler.step(opt_g)
            disc.requires_grad_(True)

            scaler.update()
            finish({"d": loss_d.detach(), "g": loss_g.detach()})  # <- here

        torch.save(
            {"gen": gen.state_dict(), "disc": disc.state_dict(), "opt_g": opt_g.state_dict(),
             "opt_d": opt_d.state_dict(), "scaler": scaler.state_dict(), "epoch": epoch},
            f"vocoder_{epoch:04d}.pt",
        )
