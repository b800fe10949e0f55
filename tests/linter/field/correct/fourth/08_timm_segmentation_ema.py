import copy
import math
from pathlib import Path

import timm
import torch
import torch.nn as nn
import torch.nn.functional as F
from timm.utils import ModelEmaV2, NativeScaler
from torch.utils.data import DataLoader

from cityscapes import CityTrain, CityVal

OUT = Path("out/seg")
CLASSES, ACCUM, EPOCHS, EPS = 19, 2, 160, 1e-6


class FPNSeg(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = timm.create_model("convnext_small", pretrained=True, features_only=True)
        chans = self.body.feature_info.channels()
        self.lat = nn.ModuleList(nn.Conv2d(c, 192, 1) for c in chans)
        self.head = nn.Sequential(nn.Conv2d(192, 192, 3, 1, 1), nn.BatchNorm2d(192), nn.GELU(), nn.Conv2d(192, CLASSES, 1))

    def forward(self, x):
        y = None
        for lat, f in zip(reversed(self.lat), reversed(self.body(x))):
            f = lat(f)
            y = f if y is None else f + F.interpolate(y, size=f.shape[-2:])
        return F.interpolate(self.head(y), size=x.shape[-2:], mode="bilinear", align_corners=False)


def tversky(logits, target, alpha=0.3, beta=0.7):
    with torch.autocast("cuda", enabled=False):
        keep = (target != 255).unsqueeze(1).float()
        prob = torch.exp(F.log_softmax(logits.float(), dim=1)) * keep
        hot = F.one_hot(target.clamp(max=CLASSES - 1), CLASSES).permute(0, 3, 1, 2).float() * keep
        tp = (prob * hot).sum((0, 2, 3))
        fp = (prob * (1 - hot)).sum((0, 2, 3))
        fn = ((1 - prob) * hot).sum((0, 2, 3))
        return (1 - (tp + EPS) / (tp + alpha * fp + beta * fn + EPS)).mean()


def train_epoch(model, ema, loader, opt, loss_scaler, sched):
    model.train()
    opt.zero_grad()
    for i, (img, seg) in enumerate(loader):
        img, seg = img.cuda(non_blocking=True), seg.cuda(non_blocking=True)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = model(img)
            loss = F.cross_entropy(logits, seg, ignore_index=255) + tversky(logits, seg)
        apply = (i + 1) % ACCUM == 0
        loss_scaler(
            loss / ACCUM, opt, clip_grad=0.05, clip_mode="agc", parameters=list(model.parameters()), need_update=apply
        )
        if apply:
            opt.zero_grad()
            sched.step()
            ema.update(model)
    return loss.item()


@torch.inference_mode()
def evaluate(module, loader):
    net = copy.deepcopy(module).eval().half()
    hist = torch.zeros(CLASSES, CLASSES, dtype=torch.long, device="cuda")
    for img, seg in loader:
        pred = net(img.cuda().half()).argmax(1)
        seg = seg.cuda()
        ok = seg != 255
        hist += torch.bincount(seg[ok] * CLASSES + pred[ok], minlength=CLASSES**2).view(CLASSES, CLASSES)
    iou = hist.diag().float() / (hist.sum(0) + hist.sum(1) - hist.diag()).clamp(min=1).float()
    return iou.mean().item()


def main():
    OUT.mkdir(parents=True, exist_ok=True)
    model = FPNSeg().cuda()
    ema = ModelEmaV2(model, decay=0.9998)
    loader = DataLoader(CityTrain(crop=768), 8, shuffle=True, num_workers=12, drop_last=True)
    val = DataLoader(CityVal(), 1, num_workers=4)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
    total = EPOCHS * (len(loader) // ACCUM)
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda s: 0.5 * (1 + math.cos(math.pi * min(1.0, s / total))))
    loss_scaler = NativeScaler()
    first, last = 0, OUT / "last.pth"
    if last.exists():
        ck = torch.load(last, map_location="cuda", weights_only=True)
        model.load_state_dict(ck["model"])
        ema.module.load_state_dict(ck["ema"])
        opt.load_state_dict(ck["opt"])
        sched.load_state_dict(ck["sched"])
        loss_scaler.load_state_dict(ck[loss_scaler.state_dict_key])
        first = ck["epoch"] + 1
    for epoch in range(first, EPOCHS):
        loss = train_epoch(model, ema, loader, opt, loss_scaler, sched)
        print(f"{epoch} loss {loss:.4f} ema miou {evaluate(ema.module, val):.4f}")
        ck = {"model": model.state_dict(), "ema": ema.module.state_dict(), "opt": opt.state_dict(), "epoch": epoch}
        ck.update({"sched": sched.state_dict(), loss_scaler.state_dict_key: loss_scaler.state_dict()})
        torch.save(ck, last)


if __name__ == "__main__":
    main()
