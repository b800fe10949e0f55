# source: https://github.com/neosr-project/neosr/pull/9
# mistake: scaler.update() is called after the generator's step although the discriminator's gradients, made with the old scale, are still to be stepped with the same scaler
# severity: error
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class UpscalerModel:
    """x4 super resolution with a patch discriminator."""

    def __init__(self, opt, net_g, net_d):
        self.opt = opt
        self.net_g = net_g.cuda()
        self.net_d = net_d.cuda()
        self.optim_g = torch.optim.Adam(net_g.parameters(), lr=opt["lr_g"], betas=(0.9, 0.99))
        self.optim_d = torch.optim.Adam(net_d.parameters(), lr=opt["lr_d"], betas=(0.9, 0.99))
        self.scaler = GradScaler(enabled=opt["amp"], init_scale=2.0 ** 11)
        self.logs = {}

    def feed(self, lq, gt):
        self.lq = lq.cuda(non_blocking=True)
        self.gt = gt.cuda(non_blocking=True)

    def _freeze_d(self, frozen):
        for p in self.net_d.parameters():
            p.requires_grad_(not frozen)

    def _generator_backward(self):
        self._freeze_d(True)
        with autocast(enabled=self.opt["amp"]):
            self.sr = self.net_g(self.lq)
            pix = F.l1_loss(self.sr, self.gt)
            logits = self.net_d(self.sr)
            adv = F.binary_cross_entropy_with_logits(logits, torch.ones_like(logits))
            loss = pix + self.opt["adv_weight"] * adv
        self.scaler.scale(loss).backward()
        self.logs.update(pix=pix.item(), adv=adv.item())

    def _discriminator_backward(self):
        self._freeze_d(False)
        with autocast(enabled=self.opt["amp"]):
            real = self.net_d(self.gt)
            fake = self.net_d(self.sr.detach())
            loss = F.binary_cross_entropy_with_logits(real, torch.ones_like(real))
            loss = loss + F.binary_cross_entropy_with_logits(fake, torch.zeros_like(fake))
        self.scaler.scale(loss).backward()
        self.logs["d"] = loss.item()

    def _apply(self, optimizer):
        self.scaler.step(optimizer)  # <- here
        self.scaler.update()  # <- here

    def optimize_parameters(self):
        self.optim_g.zero_grad(set_to_none=True)
        self.optim_d.zero_grad(set_to_none=True)
        self._generator_backward()
        self._discriminator_backward()
        self._apply(self.optim_g)  # <- here
        self._apply(self.optim_d)  # <- here
        return self.logs


def train(model, loader, iters):
    done = 0
    while done < iters:
        for lq, gt in loader:
            model.feed(lq, gt)
            logs = model.optimize_parameters()
            done += 1
            if done % 100 == 0:
                print(done, logs)
            if done == iters:
                return
