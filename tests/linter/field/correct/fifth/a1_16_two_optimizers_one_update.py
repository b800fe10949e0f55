# why correct: one scaler serves two optimizers: each loss is scaled, each optimizer unscaled and stepped, and update() comes once at the end of the iteration
import torch
import torch.nn as nn
import torch.nn.functional as F


def hinge_d(real, fake):
    return F.relu(1 - real).mean() + F.relu(1 + fake).mean()


class EnhancerGan:
    """Speech enhancement: U-shaped generator against a spectral critic."""

    def __init__(self, enhancer, critic, lr=2e-4, clip=5.0):
        self.enhancer, self.critic = enhancer.cuda(), critic.cuda()
        self.opt_e = torch.optim.AdamW(enhancer.parameters(), lr, betas=(0.5, 0.9))
        self.opt_c = torch.optim.AdamW(critic.parameters(), 2 * lr, betas=(0.5, 0.9))
        self.scaler = torch.amp.GradScaler("cuda")
        self.clip = clip

    def amp(self):
        return torch.autocast("cuda", dtype=torch.float16)

    def _apply(self, opt, net):
        self.scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), self.clip)
        self.scaler.step(opt)

    def iteration(self, noisy, clean):
        with self.amp():
            fake = self.enhancer(noisy)

        self.critic.requires_grad_(True)
        with self.amp():
            d = hinge_d(self.critic(clean).float(), self.critic(fake.detach()).float())
        self.opt_c.zero_grad(set_to_none=True)
        self.scaler.scale(d).backward()
        self._apply(self.opt_c, self.critic)

        self.critic.requires_grad_(False)
        with self.amp():
            adv = -self.critic(fake).float().mean()
        rec = F.l1_loss(fake.float(), clean)
        g = adv + 40.0 * rec
        self.opt_e.zero_grad(set_to_none=True)
        self.scaler.scale(g).backward()
        self._apply(self.opt_e, self.enhancer)

        self.scaler.update()
        return {"d": d.detach(), "g": g.detach(), "rec": rec.detach()}

    def checkpoint(self):
        names = ("enhancer", "critic", "opt_e", "opt_c", "scaler")
        return {n: getattr(self, n).state_dict() for n in names}

    def restore(self, blob):
        for name, state in blob.items():
            getattr(self, name).load_state_dict(state)

    def run(self, loader, epochs):
        for epoch in range(epochs):
            for noisy, clean in loader:
                logs = self.iteration(noisy.cuda(), clean.cuda())
            print(epoch, {k: round(v.item(), 4) for k, v in logs.items()})
            torch.save(self.checkpoint(), f"enhancer{epoch}.pt")
