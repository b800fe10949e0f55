# why correct: non-reentrant checkpointing runs the blocks again under the autocast state of the first pass, so the backward pass outside the region is fine
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint


def norm_act(c):
    return nn.Sequential(nn.InstanceNorm3d(c, affine=True), nn.LeakyReLU(0.01, inplace=True))


class Residual(nn.Module):
    def __init__(self, i, o, stride=1):
        super().__init__()
        self.a = nn.Conv3d(i, o, 3, stride, 1, bias=False)
        self.na = norm_act(o)
        self.b = nn.Conv3d(o, o, 3, 1, 1, bias=False)
        self.nb = nn.InstanceNorm3d(o, affine=True)
        self.skip = nn.Conv3d(i, o, 1, stride, bias=False) if i != o or stride != 1 else nn.Identity()

    def forward(self, x):
        return F.leaky_relu(self.nb(self.b(self.na(self.a(x)))) + self.skip(x), 0.01)


class Volume(nn.Module):
    def __init__(self, sequences=4, labels=4, w=32, save_memory=True):
        super().__init__()
        self.save_memory = save_memory
        c = [w, 2 * w, 4 * w, 8 * w]
        self.stem = nn.Conv3d(sequences, w, 3, 1, 1)
        self.down = nn.ModuleList(Residual(c[i - 1] if i else w, c[i], 2 if i else 1) for i in range(4))
        self.up = nn.ModuleList(Residual(c[i] + c[i - 1], c[i - 1]) for i in (3, 2, 1))
        self.out = nn.Conv3d(w, labels, 1)

    def call(self, block, *xs):
        x = torch.cat(xs, 1) if len(xs) > 1 else xs[0]
        if self.save_memory and self.training:
            return checkpoint(block, x, use_reentrant=False)
        return block(x)

    def forward(self, x):
        h, kept = self.stem(x), []
        for block in self.down:
            h = self.call(block, h)
            kept.append(h)
        kept.pop()
        for block in self.up:
            h = F.interpolate(h, scale_factor=2, mode="trilinear", align_corners=False)
            h = self.call(block, h, kept.pop())
        return self.out(h)


def dice_ce(logits, target):
    logits = logits.float()
    ce = F.cross_entropy(logits, target)
    p = logits.softmax(1)
    t = F.one_hot(target, logits.size(1)).movedim(-1, 1).float()
    overlap = (p * t).sum((2, 3, 4))
    dice = (2 * overlap + 1) / (p.sum((2, 3, 4)) + t.sum((2, 3, 4)) + 1)
    return ce + 1 - dice[:, 1:].mean()


def fit(loader, epochs=300, lr=1e-3, amp=True):
    net = Volume().cuda()
    optimizer = torch.optim.AdamW(net.parameters(), lr, weight_decay=1e-4)
    plan = torch.optim.lr_scheduler.PolynomialLR(optimizer, epochs, 0.9)
    scaler = torch.amp.GradScaler("cuda", enabled=amp)
    for epoch in range(epochs):
        net.train()
        mean = 0.0
        for scan, mask in loader:
            with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
                logits = net(scan.cuda())
            loss = dice_ce(logits, mask.cuda())
            optimizer.zero_grad(set_to_none=True)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(net.parameters(), 12.0)
            scaler.step(optimizer)
            scaler.update()
            mean += loss.item() / len(loader)
        plan.step()
        print(epoch, round(mean, 4))
    return net
