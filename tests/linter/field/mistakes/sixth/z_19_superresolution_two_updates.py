# source: neosr-project/neosr PR #9
# mistake: update() is called between the two optimizers' steps, so when the scale changes the second optimizer's gradients are divided by another scale than they were multiplied by
# severity: error
from collections import OrderedDict

import torch
from torch import nn


class Registry(OrderedDict):
    def zero(self):
        for o in self.values():
            o.zero_grad(set_to_none=True)


class SRModel:
    """Image super-resolution with a learned degradation network trained alongside."""

    def __init__(self, opt, upscaler: nn.Module, degrader: nn.Module):
        self.opt = opt
        self.device = torch.device("cuda")
        self.upscaler, self.degrader = upscaler.to(self.device), degrader.to(self.device)
        self.optimizers = Registry(
            up=torch.optim.AdamW(self.upscaler.parameters(), lr=opt["lr_up"]),
            down=torch.optim.AdamW(self.degrader.parameters(), lr=opt["lr_down"]),
        )
        self.gradscaler = torch.amp.GradScaler("cuda", enabled=opt["use_amp"], init_scale=2.0**11)
        self.log = OrderedDict()

    def feed(self, data):
        self.lq = data["lq"].to(self.device, non_blocking=True)
        self.gt = data["gt"].to(self.device, non_blocking=True)

    def forward_losses(self):
        with torch.autocast("cuda", torch.float16, enabled=self.opt["use_amp"]):
            sr = self.upscaler(self.lq)
            lr = self.degrader(self.gt)
            cycle = self.upscaler(lr)
            l_up = nn.functional.l1_loss(sr, self.gt)
            l_down = nn.functional.l1_loss(lr, self.lq)
            l_cycle = self.opt["w_cycle"] * nn.functional.l1_loss(cycle, self.gt)
        self.log.update(up=l_up.detach(), down=l_down.detach(), cycle=l_cycle.detach())
        return l_up + l_down + l_cycle

    def _finish(self, name, net):
        optimizer = self.optimizers[name]
        self.gradscaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), self.opt["max_norm"])
        self.gradscaler.step(optimizer)
        self.gradscaler.update()  # <- here

    def optimize_parameters(self):
        self.optimizers.zero()
        self.gradscaler.scale(self.forward_losses()).backward()
        self._finish("up", self.upscaler)  # <- here
        self._finish("down", self.degrader)  # <- here


def pipeline(opt, loader, upscaler, degrader):
    model = SRModel(opt, upscaler, degrader)
    it = 0
    while it < opt["total_iter"]:
        for data in loader:
            model.feed(data)
            model.optimize_parameters()
            it += 1
            if it % opt["print_freq"] == 0:
                print(it, {k: round(v.item(), 4) for k, v in model.log.items()})
            if it == opt["total_iter"]:
                break
    torch.save(upscaler.state_dict(), opt["out"])
