# source: https://github.com/neosr-project/neosr/pull/9
# mistake: one GradScaler serves both optimizers, both losses are backpropagated with the old scale, but update() already runs between the two steps, so the second optimizer unscales by a scale its gradients were not made with
# severity: warning
from collections import OrderedDict

import torch
from torch import nn
from torch.nn import functional as F


class ImageModel:
    """Super-resolution with an adversarial term; both networks see the same batch."""

    def __init__(self, opt, net_g, net_d, perceptual):
        self.opt = opt
        self.device = torch.device("cuda")
        self.net_g = net_g.to(self.device)
        self.net_d = net_d.to(self.device)
        self.perceptual = perceptual.to(self.device).eval()
        self.optimizer_g = torch.optim.Adam(self.net_g.parameters(), **opt["optim_g"])
        self.optimizer_d = torch.optim.Adam(self.net_d.parameters(), **opt["optim_d"])
        self.use_amp = opt.get("use_amp", True)
        self.scaler = torch.cuda.amp.GradScaler(enabled=self.use_amp, init_scale=2.0**11)
        self.logs = OrderedDict()

    def feed(self, batch):
        self.lq = batch["lq"].to(self.device, non_blocking=True)
        self.gt = batch["gt"].to(self.device, non_blocking=True)

    def gan(self, logits, is_real):
        goal = torch.full_like(logits, 1.0 if is_real else 0.0)
        return F.binary_cross_entropy_with_logits(logits, goal)

    def optimize_parameters(self, it):
        self.optimizer_g.zero_grad(set_to_none=True)
        self.optimizer_d.zero_grad(set_to_none=True)

        for p in self.net_d.parameters():
            p.requires_grad = False
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.use_amp):
            self.output = self.net_g(self.lq)
            pix = F.l1_loss(self.output, self.gt)
            per = self.perceptual(self.output, self.gt)
            adv = self.gan(self.net_d(self.output), True)
            l_g = pix + self.opt["w_per"] * per + self.opt["w_adv"] * adv
        self.scaler.scale(l_g).backward()

        for p in self.net_d.parameters():
            p.requires_grad = True
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.use_amp):
            l_real = self.gan(self.net_d(self.gt), True)
            l_fake = self.gan(self.net_d(self.output.detach()), False)
        self.scaler.scale(l_real + l_fake).backward()

        self.scaler.unscale_(self.optimizer_g)
        nn.utils.clip_grad_norm_(self.net_g.parameters(), 1.0)
        self.scaler.step(self.optimizer_g)
        self.scaler.update()  # <- here

        self.scaler.unscale_(self.optimizer_d)  # <- here
        nn.utils.clip_grad_norm_(self.net_d.parameters(), 1.0)
        self.scaler.step(self.optimizer_d)  # <- here
        self.scaler.update()  # <- here

        self.logs.update(pix=pix.item(), per=per.item(), adv=adv.item(),
                         d_real=l_real.item(), d_fake=l_fake.item())

    def save(self, it):
        torch.save(
            {"iter": it, "g": self.net_g.state_dict(), "d": self.net_d.state_dict(),
             "og": self.optimizer_g.state_dict(), "od": self.optimizer_d.state_dict(),
             "scaler": self.scaler.state_dict()},
            f"{self.opt['dir']}/{it}.state",
        )


def train(model, loader, total):
    it = 0
    while it < total:
        for batch in loader:
            it += 1
            model.feed(batch)
            model.optimize_parameters(it)
            if it % 500 == 0:
                print(it, dict(model.logs))
            if it % 5000 == 0:
                model.save(it)
