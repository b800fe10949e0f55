# source: https://github.com/fastino-ai/GLiNER2/pull/155
# mistake: under float16 autocast the sigmoid is clamped at 1 - 1e-4, which rounds to exactly 1.0 in float16, so log(1 - p) becomes -inf and the focal loss NaN
# severity: error
import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torchvision.models import resnet34


def squash(x):
    return torch.clamp(torch.sigmoid(x), min=1e-4, max=1 - 1e-4)  # <- here


def heatmap_focal(p, target):
    peak = target.eq(1).float()
    rest = 1 - peak
    falloff = torch.pow(1 - target, 4)
    pos = torch.log(p) * torch.pow(1 - p, 2) * peak
    neg = torch.log(1 - p) * torch.pow(p, 2) * falloff * rest  # <- here
    n = peak.sum().clamp(min=1)
    return -(pos.sum() + neg.sum()) / n


def gather_at(maps, idx):
    c = maps.shape[1]
    flat = maps.flatten(2).transpose(1, 2)
    return flat.gather(1, idx[..., None].expand(-1, -1, c))


class Landmarks(nn.Module):
    """Vertebra corners on spine radiographs."""

    def __init__(self, joints=68):
        super().__init__()
        r = resnet34(weights="DEFAULT")
        self.stem = nn.Sequential(r.conv1, r.bn1, r.relu, r.maxpool, r.layer1, r.layer2)
        self.up = nn.Sequential(nn.ConvTranspose2d(128, 128, 4, 2, 1), nn.BatchNorm2d(128), nn.ReLU())
        self.heat = nn.Sequential(nn.Conv2d(128, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, joints, 1))
        self.off = nn.Sequential(nn.Conv2d(128, 64, 3, padding=1), nn.ReLU(), nn.Conv2d(64, 2, 1))
        nn.init.constant_(self.heat[-1].bias, -2.19)

    def forward(self, x):
        f = self.up(self.stem(x))
        return self.heat(f), self.off(f)


def train_epoch(net, loader, opt, scaler, w_off=1.0):
    net.train()
    for b in loader:
        b = {k: v.cuda(non_blocking=True) for k, v in b.items()}
        opt.zero_grad(set_to_none=True)
        with autocast():
            heat, off = net(b["image"])
            hm = heatmap_focal(squash(heat), b["heat"])  # <- here
            at = gather_at(off, b["index"])
            m = b["mask"][..., None].float()
            reg = (torch.abs(at - b["offset"]) * m).sum() / m.sum().clamp(min=1)
            loss = hm + w_off * reg
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
    return hm.item(), reg.item()


if __name__ == "__main__":
    from spine_data import loaders

    train_loader, _ = loaders("spine/", batch=16)
    net = Landmarks().cuda()
    opt = torch.optim.Adam(net.parameters(), 2.5e-4)
    step = torch.optim.lr_scheduler.MultiStepLR(opt, [90, 120])
    scaler = GradScaler()
    for epoch in range(140):
        print(epoch, *train_epoch(net, train_loader, opt, scaler))
        step.step()
