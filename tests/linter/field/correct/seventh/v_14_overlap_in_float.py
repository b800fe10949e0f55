# why correct: probabilities are made and summed over a million pixels after .float(), so the sums never live in float16
import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class OverlapAndEntropy(nn.Module):
    def __init__(self, classes, weight=0.5, smooth=1e-6):
        super().__init__()
        self.classes, self.weight, self.smooth = classes, weight, smooth

    def forward(self, logits, target):
        logits = logits.float()
        p = logits.softmax(1)
        hot = F.one_hot(target, self.classes).permute(0, 3, 1, 2).to(p.dtype)
        both = (p * hot).sum((0, 2, 3))
        size = p.sum((0, 2, 3)) + hot.sum((0, 2, 3))
        dice = 1 - ((2 * both + self.smooth) / (size + self.smooth)).mean()
        return self.weight * dice + (1 - self.weight) * F.cross_entropy(logits, target)


def sep(i, o):
    return nn.Sequential(
        nn.Conv2d(i, i, 3, padding=1, groups=i), nn.Conv2d(i, o, 1), nn.GroupNorm(8, o), nn.SiLU()
    )


class Fast(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 32, 3, 2, 1), sep(32, 64), sep(64, 128)
        self.out = nn.Conv2d(128, classes, 1)

    def forward(self, x):
        y = self.c(F.max_pool2d(self.b(F.silu(self.a(x))), 2))
        return F.interpolate(self.out(y), size=x.shape[-2:], mode="bilinear")


class Fitter:
    def __init__(self, net, classes):
        self.net = net.cuda()
        self.crit = OverlapAndEntropy(classes)
        self.opt = torch.optim.AdamW(net.parameters(), 6e-4)
        self.scaler = GradScaler(growth_interval=1000)

    def epoch(self, loader):
        for x, y in loader:
            self.opt.zero_grad(set_to_none=True)
            with autocast():
                logits = self.net(x.cuda())
            loss = self.crit(logits, y.cuda())
            self.scaler.scale(loss).backward()
            self.scaler.step(self.opt)
            self.scaler.update()
        return loss.item()


if __name__ == "__main__":
    from cities import loader

    fit = Fitter(Fast(19), 19)
    for e in range(120):
        print(e, fit.epoch(loader(crop=1024, batch=8)))
