# source: IAHispano/Applio PR #860
# mistake: besides scaler.step(...) the generator's and discriminator's optimizers are also stepped directly, which applies every update twice and applies it even when the scaler skipped it for inf gradients
# severity: error
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler, autocast
from torch.utils.tensorboard import SummaryWriter

from svc.losses import feature_loss, lsgan_d, lsgan_g
from svc.mel import log_mel
from svc.nets import MultiPeriodDiscriminator, Vocoder


class GanSession:
    def __init__(self, hp, rank=0):
        self.hp = hp
        self.device = torch.device("cuda", rank)
        self.gen = Vocoder(hp.model).to(self.device)
        self.disc = MultiPeriodDiscriminator(hp.periods).to(self.device)
        make = lambda m: torch.optim.AdamW(m.parameters(), hp.lr, betas=(0.8, 0.99), eps=1e-9)
        self.opt_gen, self.opt_disc = make(self.gen), make(self.disc)
        self.scaler = GradScaler("cuda", enabled=hp.fp16)
        self.board = SummaryWriter(hp.logdir)
        self.step = 0

    def discriminator_turn(self, real, fake):
        with autocast("cuda", dtype=torch.float16, enabled=self.hp.fp16):
            on_real, on_fake, _, _ = self.disc(real, fake.detach())
        loss = lsgan_d([o.float() for o in on_real], [o.float() for o in on_fake])
        self.opt_disc.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt_disc)
        nn.utils.clip_grad_norm_(self.disc.parameters(), self.hp.clip)
        self.scaler.step(self.opt_disc)
        return loss

    def generator_turn(self, real, fake):
        with autocast("cuda", dtype=torch.float16, enabled=self.hp.fp16):
            _, on_fake, map_real, map_fake = self.disc(real, fake)
        with autocast("cuda", enabled=False):
            mel = F.l1_loss(log_mel(fake.float()), log_mel(real.float())) * 45.0
            adv = lsgan_g([o.float() for o in on_fake])
            fm = feature_loss(map_real, map_fake)
        loss = adv + fm + mel
        self.opt_gen.zero_grad()
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt_gen)
        nn.utils.clip_grad_norm_(self.gen.parameters(), self.hp.clip)
        self.scaler.step(self.opt_gen)
        return loss, mel

    def run_epoch(self, loader):
        self.gen.train()
        self.disc.train()
        for units, pitch, wav in loader:
            units, pitch, wav = (t.to(self.device, non_blocking=True) for t in (units, pitch, wav))
            with autocast("cuda", dtype=torch.float16, enabled=self.hp.fp16):
                fake = self.gen(units, pitch)
            d = self.discriminator_turn(wav, fake)
            g, mel = self.generator_turn(wav, fake)
            self.scaler.update()
            self.opt_gen.step()  # <- here
            self.opt_disc.step()  # <- here
            self.step += 1
            if self.step % self.hp.log_every == 0:
                self.board.add_scalar("d", d.item(), self.step)
                self.board.add_scalar("g", g.item(), self.step)
                self.board.add_scalar("mel", mel.item(), self.step)

    def save(self, path):
        torch.save(
            {
                "gen": self.gen.state_dict(),
                "disc": self.disc.state_dict(),
                "opt_gen": self.opt_gen.state_dict(),
                "opt_disc": self.opt_disc.state_dict(),
                "scaler": self.scaler.state_dict(),
                "step": self.step,
            },
            path,
        )
