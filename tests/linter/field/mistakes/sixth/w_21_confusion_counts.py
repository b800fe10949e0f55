# source: pytorch/xla pull request #2425 (same: huggingface/transformers pull request #8561)
# mistake: pixel counts of the validation are summed up in bfloat16 tensors, which stop growing at a few hundred times the addend, so IoU and the choice of the best model are wrong
# severity: warning
import torch
from torch import nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import PolynomialLR

PRECISION = torch.bfloat16


class IoU:
    def __init__(self, classes: int, device, ignore=255):
        self.ignore = ignore
        self.classes = classes
        self.inter = torch.zeros(classes, device=device, dtype=PRECISION)  # <- here
        self.union = torch.zeros(classes, device=device, dtype=PRECISION)  # <- here

    def add(self, guess, truth):
        keep = truth != self.ignore
        guess, truth = guess[keep], truth[keep]
        for c in range(self.classes):
            g, t = guess == c, truth == c
            self.inter[c] += (g & t).sum()  # <- here
            self.union[c] += (g | t).sum()  # <- here

    def value(self):
        seen = self.union > 0
        return (self.inter[seen] / self.union[seen]).float().mean().item()


class Segmenter(nn.Module):
    def __init__(self, encoder, channels, classes):
        super().__init__()
        self.encoder = encoder
        self.fuse = nn.Sequential(nn.Conv2d(channels, 256, 1, bias=False), nn.BatchNorm2d(256), nn.ReLU())
        self.cls = nn.Conv2d(256, classes, 1)

    def forward(self, x):
        y = self.cls(self.fuse(self.encoder(x)))
        return nn.functional.interpolate(y, size=x.shape[-2:], mode="bilinear", align_corners=False)


def train_one(net, loader, opt, sched, device):
    net.train()
    for img, mask in loader:
        img, mask = img.to(device, non_blocking=True), mask.to(device, non_blocking=True)
        with torch.autocast("cuda", dtype=PRECISION):
            logits = net(img)
            loss = nn.functional.cross_entropy(logits, mask.long(), ignore_index=255)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()


@torch.no_grad()
def validate(net, loader, classes, device):
    net.eval()
    meter = IoU(classes, device)
    for img, mask in loader:
        with torch.autocast("cuda", dtype=PRECISION):
            logits = net(img.to(device, non_blocking=True))
        meter.add(logits.argmax(1), mask.to(device).long())
    return meter.value()


def fit(encoder, channels, train_dl, val_dl, classes=19, epochs=80, device="cuda"):
    net = Segmenter(encoder, channels, classes).to(device)
    opt = AdamW([
        {"params": net.encoder.parameters(), "lr": 6e-5},
        {"params": list(net.fuse.parameters()) + list(net.cls.parameters()), "lr": 6e-4},
    ], weight_decay=0.01)
    sched = PolynomialLR(opt, total_iters=epochs * len(train_dl), power=0.9)
    best = 0.0
    for epoch in range(epochs):
        train_one(net, train_dl, opt, sched, device)
        miou = validate(net, val_dl, classes, device)
        print(f"epoch {epoch} mIoU {miou:.4f}")
        if miou > best:
            best = miou
            torch.save(net.state_dict(), "segmenter_best.pt")
    return best
