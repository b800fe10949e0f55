# source: https://github.com/neosr-project/neosr/pull/9
# mistake: scaler.update() runs between the steps of two optimizers whose gradients were made with the same scale, so the second is unscaled by the wrong factor whenever the scale changes
# severity: error
from collections import OrderedDict

import torch
import torch.nn.functional as F


class SRModel:
    def __init__(self, net_g, net_d, perceptual, opt):
        self.device = torch.device("cuda")
        self.net_g, self.net_d = net_g.to(self.device), net_d.to(self.device)
        self.perceptual = perceptual.to(self.device).eval()
        for p in self.perceptual.parameters():
            p.requires_grad_(False)
        self.opt = opt
        self.optim_g = torch.optim.Adam(self.net_g.parameters(), lr=opt["lr_g"], betas=(0.9, 0.99))
        self.optim_d = torch.optim.Adam(self.net_d.parameters(), lr=opt["lr_d"], betas=(0.9, 0.99))
        self.scaler = torch.cuda.amp.GradScaler(init_scale=2.0 ** 11)
        self.amp = opt.get("amp", torch.float16)
        self.log = OrderedDict()

    def feed(self, data):
        self.lq = data["lq"].to(self.device, non_blocking=True)
        self.gt = data["gt"].to(self.device, non_blocking=True)

    def _freeze_d(self, frozen):
        for p in self.net_d.parameters():
            p.requires_grad_(not frozen)

    def _generator_loss(self):
        self.out = self.net_g(self.lq)
        pix = F.l1_loss(self.out, self.gt)
        per = F.l1_loss(self.perceptual(self.out), self.perceptual(self.gt))
        adv = F.softplus(-self.net_d(self.out).float()).mean()
        self.log["pix"], self.log["per"], self.log["adv"] = pix.detach(), per.detach(), adv.detach()
        return pix + self.opt["w_per"] * per + self.opt["w_adv"] * adv

    def _critic_loss(self):
        real = self.net_d(self.gt).float()
        fake = self.net_d(self.out.detach()).float()
        loss = F.softplus(-real).mean() + F.softplus(fake).mean()
        self.log["critic"] = loss.detach()
        return loss

    def optimize(self):
        self.optim_g.zero_grad(set_to_none=True)
        self.optim_d.zero_grad(set_to_none=True)

        self._freeze_d(True)
        with torch.autocast("cuda", dtype=self.amp):
            loss_g = self._generator_loss()
        self.scaler.scale(loss_g).backward()

        self._freeze_d(False)
        with torch.autocast("cuda", dtype=self.amp):
            loss_d = self._critic_loss()
        self.scaler.scale(loss_d).backward()

        self.scaler.step(self.optim_g)
        self.scaler.update()  # <- here
        self.scaler.step(self.optim_d)  # <- here
        self.scaler.update()  # <- here

    def run(self, loader, iters):
        done = 0
        while done < iters:
            for data in loader:
                self.feed(data)
                self.optimize()
                done += 1
                if done % 100 == 0:
                    print(done, {k: round(v.item(), 4) for k, v in self.log.items()})
                if done >= iters:
                    return
