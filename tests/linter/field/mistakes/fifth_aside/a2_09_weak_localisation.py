# source: https://github.com/lightonai/pylate/issues/239
# mistake: 1e-8 guards a division of float16 tensors under autocast, where it rounds to zero, so a class map that is constant (all zero after ReLU) gives 0/0 = NaN
# severity: error
"""Weakly supervised lesion localisation from image-level labels."""
import torch
import torch.nn as nn
import torch.nn.functional as F
import torchvision

TINY = 1e-8  # <- here


class CamNet(nn.Module):
    def __init__(self, findings=14):
        super().__init__()
        r = torchvision.models.resnet50(weights="IMAGENET1K_V2")
        self.features = nn.Sequential(*list(r.children())[:-2])
        self.score = nn.Conv2d(2048, findings, 1, bias=False)
        self.refine = nn.Conv2d(findings, findings, 3, padding=1)

    def forward(self, x):
        maps = self.score(self.features(x))
        logits = maps.flatten(2).mean(-1)
        return logits, self.refine(F.relu(maps))


def unit_range(maps):
    maps = F.relu(maps)
    lo = maps.amin(dim=(2, 3), keepdim=True)
    hi = maps.amax(dim=(2, 3), keepdim=True)
    return (maps - lo) / (hi - lo + TINY)  # <- here


def equivariance(net, image, maps):
    flipped = net(torch.flip(image, dims=(-1,)))[1]
    return F.l1_loss(unit_range(torch.flip(flipped, dims=(-1,))), unit_range(maps))


def build(lr):
    net = CamNet().cuda()
    groups = [
        {"params": net.features.parameters(), "lr": lr * 0.1},
        {"params": list(net.score.parameters()) + list(net.refine.parameters()), "lr": lr},
    ]
    return net, torch.optim.SGD(groups, momentum=0.9, weight_decay=1e-4)


def fit(loader, epochs=20, lr=0.02, weight=0.5):
    net, opt = build(lr)
    scaler = torch.amp.GradScaler("cuda")
    bce = nn.BCEWithLogitsLoss()
    for epoch in range(epochs):
        for image, findings in loader:
            image, findings = image.cuda(), findings.cuda().float()
            opt.zero_grad(set_to_none=True)
            with torch.amp.autocast("cuda", dtype=torch.float16):
                logits, maps = net(image)
                cls = bce(logits, findings)
                eq = equivariance(net, image, maps)
                loss = cls + weight * eq
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        print(epoch, float(cls), float(eq))
    return net
