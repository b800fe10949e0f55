# source: neosr-project/neosr PR #9
# mistake: the scaler is updated after each of the two optimizers, so the second one's gradients are unscaled with another scale than they were made with whenever the scale changes
# severity: error
import argparse

import torch
import torch.nn as nn
import torchvision
from torch.cuda.amp import GradScaler, autocast
from torchvision.transforms import v2


class Grader(nn.Module):
    """ResNet features + ordinal head for leaf damage (0-5)."""

    def __init__(self, levels=6):
        super().__init__()
        net = torchvision.models.resnet50(weights="IMAGENET1K_V2")
        width = net.fc.in_features
        net.fc = nn.Identity()
        self.features = net
        self.head = nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 256), nn.GELU(), nn.Linear(256, levels - 1))

    def forward(self, x):
        return self.head(self.features(x))


def ordinal_targets(grade, levels=6):
    steps = torch.arange(levels - 1, device=grade.device)
    return (grade[:, None] > steps).float()


def loaders(root, bs):
    tf = v2.Compose(
        [
            v2.ToImage(),
            v2.RandomResizedCrop(384, antialias=True),
            v2.RandomHorizontalFlip(),
            v2.ToDtype(torch.float32, scale=True),
            v2.Normalize([0.485, 0.456, 0.406], [0.229, 0.224, 0.225]),
        ]
    )
    data = torchvision.datasets.ImageFolder(root, tf)
    return torch.utils.data.DataLoader(data, bs, shuffle=True, num_workers=8, pin_memory=True, drop_last=True)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("root")
    ap.add_argument("--bs", type=int, default=48)
    ap.add_argument("--epochs", type=int, default=25)
    ap.add_argument("--lr-features", type=float, default=1e-2)
    ap.add_argument("--lr-head", type=float, default=1e-3)
    ap.add_argument("--no-amp", dest="amp", action="store_false")
    args = ap.parse_args()

    model = Grader().cuda().to(memory_format=torch.channels_last)
    slow = torch.optim.SGD(model.features.parameters(), args.lr_features, momentum=0.9, weight_decay=1e-4)
    fast = torch.optim.AdamW(model.head.parameters(), args.lr_head)
    plans = [torch.optim.lr_scheduler.CosineAnnealingLR(o, args.epochs) for o in (slow, fast)]
    scaler = GradScaler(enabled=args.amp)
    bce = nn.BCEWithLogitsLoss()

    loader = loaders(args.root, args.bs)
    for epoch in range(args.epochs):
        model.train()
        total = 0.0
        for x, grade in loader:
            x = x.cuda(non_blocking=True).to(memory_format=torch.channels_last)
            grade = grade.cuda(non_blocking=True)
            slow.zero_grad(set_to_none=True)
            fast.zero_grad(set_to_none=True)
            with autocast(enabled=args.amp):
                loss = bce(model(x), ordinal_targets(grade))
            scaler.scale(loss).backward()
            scaler.step(slow)
            scaler.update()  # <- here
            scaler.step(fast)  # <- here
            scaler.update()  # <- here
            total += loss.item()
        for plan in plans:
            plan.step()
        print(f"{epoch:3d} {total / len(loader):.4f}")
    torch.save(model.state_dict(), "grader.pth")


if __name__ == "__main__":
    main()
