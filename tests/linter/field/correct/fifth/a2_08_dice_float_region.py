# why correct: the region loss is written outside autocast but converts logits and targets to float32 before any sum, so the voxel counts cannot overflow
import torch
import torch.nn.functional as F
from torch import nn


class RegionAndCross(nn.Module):
    def __init__(self, classes, weight_ce=0.5, background=False, eps=1e-6):
        super().__init__()
        self.classes, self.w, self.background, self.eps = classes, weight_ce, background, eps

    def dice(self, logits, labels):
        probs = logits.softmax(1)
        onehot = torch.zeros_like(probs).scatter_(1, labels[:, None], 1.0)
        if not self.background:
            probs, onehot = probs[:, 1:], onehot[:, 1:]
        dims = tuple(range(2, probs.ndim))
        tp = (probs * onehot).sum(dims)
        fp = (probs * (1 - onehot)).sum(dims)
        fn = ((1 - probs) * onehot).sum(dims)
        return 1 - ((2 * tp + self.eps) / (2 * tp + fp + fn + self.eps)).mean()

    def forward(self, logits, labels):
        logits = logits.float()
        return self.w * F.cross_entropy(logits, labels) + (1 - self.w) * self.dice(logits, labels)


def deep_supervision(outputs, labels, criterion):
    weights = [1 / 2**i for i in range(len(outputs))]
    norm = sum(weights)
    loss = 0.0
    for w, out in zip(weights, outputs):
        small = F.interpolate(labels[:, None].float(), out.shape[2:], mode="nearest").long().squeeze(1)
        loss = loss + w / norm * criterion(out, small)
    return loss


def train(net, loader, classes, iters=250, epochs=1000, lr=1e-2):
    net = net.cuda()
    crit = RegionAndCross(classes)
    opt = torch.optim.SGD(net.parameters(), lr, momentum=0.99, nesterov=True, weight_decay=3e-5)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, epochs, power=0.9)
    scaler = torch.cuda.amp.GradScaler()
    for epoch in range(epochs):
        net.train()
        for _, batch in zip(range(iters), loader):
            img = batch["data"].cuda(non_blocking=True)
            seg = batch["seg"].cuda(non_blocking=True).long()
            opt.zero_grad(set_to_none=True)
            with torch.cuda.amp.autocast():
                outs = net(img)
            loss = deep_supervision(outs, seg, crit)
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 12)
            scaler.step(opt)
            scaler.update()
        sched.step()
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict(),
                    "scaler": scaler.state_dict(), "epoch": epoch}, "latest.pth")
