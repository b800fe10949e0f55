# why correct: under autocast the parameters stay float32, hence so does the EMA copy, whose small updates survive; it is used for validation only and saved with the scaler.
import copy
import math

import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.ops import sigmoid_focal_loss

from retina.data import LesionMaps
from retina.net import LesionNet


class Shadow:
    def __init__(self, net, decay=0.9998, tau=2000.0):
        self.net = copy.deepcopy(net).eval()
        for p in self.net.parameters():
            p.requires_grad_(False)
        self.updates = 0
        self.rate = lambda n: decay * (1 - math.exp(-n / tau))

    def follow(self, net):
        self.updates += 1
        d = self.rate(self.updates)
        source = net.state_dict()
        with torch.no_grad():
            for key, value in self.net.state_dict().items():
                if value.dtype.is_floating_point:
                    value.mul_(d).add_(source[key].detach(), alpha=1 - d)
                else:
                    value.copy_(source[key])


class Training:
    def __init__(self, root, lr=1e-3, batch=8, epochs=80, use_half=True):
        self.use_half = use_half
        self.epochs = epochs
        self.loader = DataLoader(LesionMaps(root, "train"), batch, shuffle=True, num_workers=8, drop_last=True)
        self.valid = DataLoader(LesionMaps(root, "valid"), batch, num_workers=4)
        self.net = LesionNet(classes=4).cuda()
        self.shadow = Shadow(self.net)
        self.optim = torch.optim.RAdam(self.net.parameters(), lr=lr)
        self.plan = torch.optim.lr_scheduler.PolynomialLR(self.optim, epochs, 0.9)
        self.scaler = torch.cuda.amp.GradScaler(enabled=use_half)
        self.best = 0.0

    def batch(self, image, mask):
        self.optim.zero_grad()
        with torch.cuda.amp.autocast(self.use_half):
            logits = self.net(image)
        loss = sigmoid_focal_loss(logits.float(), mask, reduction="mean") + self.dice(logits.float(), mask)
        self.scaler.scale(loss).backward()
        scale = self.scaler.get_scale()
        self.scaler.step(self.optim)
        self.scaler.update()
        if self.scaler.get_scale() >= scale:
            self.shadow.follow(self.net)
        return loss.item()

    @staticmethod
    def dice(logits, mask):
        prob = logits.sigmoid()
        inter = (prob * mask).sum((0, 2, 3))
        return (1 - (2 * inter + 1) / (prob.sum((0, 2, 3)) + mask.sum((0, 2, 3)) + 1)).mean()

    @torch.no_grad()
    def score(self):
        inter = torch.zeros(4)
        size = torch.zeros(4)
        for image, mask in self.valid:
            with torch.cuda.amp.autocast(self.use_half):
                hit = (self.shadow.net(image.cuda()) > 0).float().cpu()
            inter += (hit * mask).sum((0, 2, 3))
            size += hit.sum((0, 2, 3)) + mask.sum((0, 2, 3))
        return (2 * inter / size.clamp(min=1)).mean().item()

    def run(self):
        for epoch in range(self.epochs):
            self.net.train()
            losses = [self.batch(i.cuda(), m.cuda()) for i, m in self.loader]
            self.plan.step()
            dice = self.score()
            print(f"{epoch} loss {sum(losses) / len(losses):.4f} ema dice {dice:.4f}")
            if dice > self.best:
                self.best = dice
                torch.save({"net": self.net.state_dict(), "ema": self.shadow.net.state_dict(),
                            "ema_updates": self.shadow.updates, "optim": self.optim.state_dict(),
                            "plan": self.plan.state_dict(), "scaler": self.scaler.state_dict(), "epoch": epoch},
                           "lesion_best.pt")


if __name__ == "__main__":
    Training("/data/idrid").run()
