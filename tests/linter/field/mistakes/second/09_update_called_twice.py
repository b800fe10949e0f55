"""
# source: https://github.com/neosr-project/neosr/pull/9
# mistake: each half already updates the scaler after its step and the caller updates it once more with no step in between; that call raises AssertionError (no inf checks recorded).
# severity: error
# torch: any
"""
import torch
from torch import nn


class ImageModel:
    def __init__(self, opt, net_g, net_d=None):
        self.opt = opt
        self.net_g = net_g.cuda()
        self.net_d = net_d.cuda() if net_d is not None else None
        self.pix = nn.L1Loss()
        self.adv = nn.BCEWithLogitsLoss()
        self.optimizer_g = torch.optim.AdamW(self.net_g.parameters(), lr=opt["lr_g"])
        if self.net_d is not None:
            self.optimizer_d = torch.optim.AdamW(self.net_d.parameters(), lr=opt["lr_d"])
        self.gradscaler = torch.amp.GradScaler("cuda", enabled=opt["use_amp"], init_scale=2.0**11)

    def feed_data(self, data):
        self.lq, self.gt = data["lq"].cuda(), data["gt"].cuda()

    def autocast(self):
        return torch.autocast("cuda", dtype=torch.float16, enabled=self.opt["use_amp"])

    def _optimize_generator(self):
        self.optimizer_g.zero_grad(set_to_none=True)
        with self.autocast():
            self.output = self.net_g(self.lq)
            loss = self.pix(self.output, self.gt)
            if self.net_d is not None:
                fake = self.net_d(self.output)
                loss = loss + 0.1 * self.adv(fake, torch.ones_like(fake))
        self.gradscaler.scale(loss).backward()
        self.gradscaler.unscale_(self.optimizer_g)
        nn.utils.clip_grad_norm_(self.net_g.parameters(), 1.0)
        self.gradscaler.step(self.optimizer_g)
        self.gradscaler.update()
        return loss

    def _optimize_discriminator(self):
        self.optimizer_d.zero_grad(set_to_none=True)
        with self.autocast():
            real, fake = self.net_d(self.gt), self.net_d(self.output.detach())
            loss = self.adv(real, torch.ones_like(real)) + self.adv(fake, torch.zeros_like(fake))
        self.gradscaler.scale(loss).backward()
        self.gradscaler.step(self.optimizer_d)
        self.gradscaler.update()
        return loss

    def optimize_parameters(self):
        l_g = self._optimize_generator()
        if self.net_d is not None:
            self._optimize_discriminator()
        self.gradscaler.update()  # <- here
        return l_g.detach()


def main(opt, loader, build):
    model = ImageModel(opt, build("generator"))
    for it, data in enumerate(loader):
        model.feed_data(data)
        loss = model.optimize_parameters()
        if it % 100 == 0:
            print(it, loss.item())
