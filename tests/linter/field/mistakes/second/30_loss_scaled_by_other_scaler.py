"""
# source: https://github.com/neosr-project/neosr/pull/31
# mistake: generator and discriminator have a scaler each, but the discriminator's losses are scaled by the generator's; scaler_d, which has never scaled anything, then raises AssertionError in step() (and if it had, it would divide by another scale).
# severity: error
# torch: any
"""
from collections import OrderedDict

import torch
from torch import nn


class Default:
    """A super-resolution model trained with pixel and adversarial losses."""

    def __init__(self, opt, net_g, net_d):
        self.opt = opt
        self.device = torch.device("cuda")
        self.net_g, self.net_d = net_g.to(self.device), net_d.to(self.device)
        self.cri_pix, self.cri_gan = nn.L1Loss(), nn.BCEWithLogitsLoss()
        self.use_amp = opt.get("use_amp", False)
        self.amp_dtype = torch.float16
        self.init_training_settings()

    def init_training_settings(self):
        self.net_g.train()
        self.net_d.train()
        self.optimizer_g = torch.optim.AdamW(self.net_g.parameters(), lr=self.opt["lr_g"], betas=(0.9, 0.99))
        self.optimizer_d = torch.optim.AdamW(self.net_d.parameters(), lr=self.opt["lr_d"], betas=(0.9, 0.99))
        self.scaler_g = torch.cuda.amp.GradScaler(enabled=self.use_amp)
        self.scaler_d = torch.cuda.amp.GradScaler(enabled=self.use_amp)

    def feed_data(self, data):
        self.lq = data["lq"].to(self.device, non_blocking=True)
        self.gt = data["gt"].to(self.device, non_blocking=True)

    def optimize_parameters(self, current_iter):
        for p in self.net_d.parameters():
            p.requires_grad = False
        self.optimizer_g.zero_grad(set_to_none=True)
        logs = OrderedDict()
        with torch.autocast("cuda", dtype=self.amp_dtype, enabled=self.use_amp):
            self.output = self.net_g(self.lq)
            l_pix = self.cri_pix(self.output, self.gt)
            fake_g = self.net_d(self.output)
            l_g_total = l_pix + self.opt["gan_weight"] * self.cri_gan(fake_g, torch.ones_like(fake_g))
        self.scaler_g.scale(l_g_total).backward()
        self.scaler_g.unscale_(self.optimizer_g)
        nn.utils.clip_grad_norm_(self.net_g.parameters(), 1.0)
        self.scaler_g.step(self.optimizer_g)
        self.scaler_g.update()

        for p in self.net_d.parameters():
            p.requires_grad = True
        self.optimizer_d.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=self.amp_dtype, enabled=self.use_amp):
            real_d, fake_d = self.net_d(self.gt), self.net_d(self.output.detach())
            l_d_real = self.cri_gan(real_d, torch.ones_like(real_d))
            l_d_fake = self.cri_gan(fake_d, torch.zeros_like(fake_d))
        self.scaler_g.scale(l_d_real + l_d_fake).backward()  # <- here
        self.scaler_d.step(self.optimizer_d)
        self.scaler_d.update()

        logs["l_pix"], logs["l_d"] = l_pix.item(), (l_d_real + l_d_fake).item()
        if current_iter % 100 == 0:
            print(current_iter, dict(logs))


def train(opt, loader, net_g, net_d):
    model = Default(opt, net_g, net_d)
    for current_iter, data in enumerate(loader, 1):
        model.feed_data(data)
        model.optimize_parameters(current_iter)
        if current_iter >= opt["total_iter"]:
            break
