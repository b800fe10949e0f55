# why correct: the model ends in sigmoid and nn.BCELoss is used, but the loss runs with autocast disabled on float32 probabilities
import torch
from torch import nn
from torch.utils.data import DataLoader

AMP = dict(device_type="cuda", dtype=torch.float16)


class Gate(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.conv = nn.Conv2d(c, 1, 1)

    def forward(self, x):
        return torch.sigmoid(self.conv(x).float())


class SaliencyNet(nn.Module):
    def __init__(self, c=48):
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, c, 3, 2, 1), nn.BatchNorm2d(c), nn.ReLU(True))
        self.body = nn.Sequential(*[nn.Sequential(nn.Conv2d(c, c, 3, 1, d, d), nn.BatchNorm2d(c), nn.ReLU(True))
                                    for d in (1, 2, 4, 8)])
        self.side, self.main = Gate(c), Gate(c)

    def forward(self, x):
        s = self.stem(x)
        b = self.body(s)
        up = lambda t: nn.functional.interpolate(t.float(), scale_factor=2, mode="bilinear", align_corners=False)
        return up(self.main(b)), up(self.side(s))


class HybridLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.bce = nn.BCELoss()

    @staticmethod
    def iou(p, t):
        inter = (p * t).sum((1, 2, 3))
        union = (p + t - p * t).sum((1, 2, 3))
        return (1 - (inter + 1) / (union + 1)).mean()

    def forward(self, outputs, target):
        with torch.autocast("cuda", enabled=False):
            target = target.float()
            total = 0.0
            for weight, p in zip((1.0, 0.4), outputs):
                p = p.float().clamp(0.0, 1.0)
                total = total + weight * (self.bce(p, target) + self.iou(p, target))
        return total


def train(dataset, epochs=60):
    net, criterion = SaliencyNet().cuda(), HybridLoss()
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.9, nesterov=True, weight_decay=5e-4)
    sched = torch.optim.lr_scheduler.PolynomialLR(opt, epochs, 0.9)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for image, mask in DataLoader(dataset, 24, shuffle=True, num_workers=8, drop_last=True):
            opt.zero_grad()
            with torch.autocast(**AMP):
                loss = criterion(net(image.cuda()), mask.cuda())
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        sched.step()
        print(epoch, f"{loss.item():.4f}")
    return net
