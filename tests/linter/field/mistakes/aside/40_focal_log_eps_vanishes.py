# source: https://github.com/pytorch/pytorch/issues/40497
# mistake: the sigmoid is float16 under autocast, so p + 1e-8 is p and log(0) gives -inf as soon as a probability rounds to 0 or 1.
# severity: error
# torch: any
import argparse

import torch
from torch import nn
from torchvision.models.segmentation import fcn_resnet50


class FocalLoss(nn.Module):
    def __init__(self, gamma=2.0, alpha=0.25):
        super().__init__()
        self.gamma = gamma
        self.alpha = alpha

    def forward(self, logits, target):
        p = torch.sigmoid(logits)
        pos = -self.alpha * target * (1 - p) ** self.gamma * torch.log(p + 1e-8)  # <- here
        neg = -(1 - self.alpha) * (1 - target) * p**self.gamma * torch.log(1 - p + 1e-8)  # <- here
        return (pos + neg).mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--epochs", type=int, default=20)
    ap.add_argument("--amp", action="store_true")
    opt = ap.parse_args()

    from roads import RoadTiles

    device = torch.device("cuda")
    loader = torch.utils.data.DataLoader(RoadTiles("train"), batch_size=8, shuffle=True, num_workers=4)
    net = fcn_resnet50(weights=None, num_classes=1).to(device)
    criterion = FocalLoss()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-4)
    scaler = torch.amp.GradScaler("cuda", enabled=opt.amp)

    for epoch in range(opt.epochs):
        net.train()
        for img, road in loader:
            img, road = img.to(device), road.to(device).float()
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=opt.amp):
                loss = criterion(net(img)["out"].squeeze(1), road)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        print(epoch, loss.item())


if __name__ == "__main__":
    main()
