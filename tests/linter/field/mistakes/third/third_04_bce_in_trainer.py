from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, random_split
from torchvision import datasets, transforms


@dataclass
class TrainConfig:
    root: str = "data/chestxray"
    epochs: int = 20
    batch_size: int = 64
    lr: float = 1e-3
    use_amp: bool = True
    ckpt: str = "ckpt.pt"


class SmallCNN(nn.Module):
    def __init__(self, width=32):
        super().__init__()
        layers, c_in = [], 1
        for mult in (1, 2, 4, 8):
            c_out = width * mult
            layers += [nn.Conv2d(c_in, c_out, 3, 2, 1, bias=False), nn.BatchNorm2d(c_out), nn.ReLU(inplace=True)]
            c_in = c_out
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten())
        self.head = nn.Linear(c_in, 1)

    def forward(self, x):
        return torch.sigmoid(self.head(self.features(x))).squeeze(1)


class Trainer:
    def __init__(self, cfg, model, loader, val_loader):
        self.cfg = cfg
        self.model = model.cuda()
        self.loader, self.val_loader = loader, val_loader
        self.criterion = nn.BCELoss()
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=cfg.lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=cfg.use_amp)

    def forward(self, x, y):
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.cfg.use_amp):
            prob = self.model(x)
            return self.criterion(prob, y)  # <- here

    def backward(self, loss):
        self.scaler.scale(loss).backward()

    def optimizer_step(self):
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)

    def fit(self):
        for epoch in range(self.cfg.epochs):
            self.model.train()
            for x, y in self.loader:
                loss = self.forward(x.cuda(), y.float().cuda())
                self.backward(loss)
                self.optimizer_step()
            print(epoch, loss.item(), self.validate())
            torch.save({"model": self.model.state_dict(), "scaler": self.scaler.state_dict()}, self.cfg.ckpt)

    @torch.no_grad()
    def validate(self):
        self.model.eval()
        hits = n = 0
        for x, y in self.val_loader:
            prob = self.model(x.cuda())
            hits += ((prob > 0.5).long().cpu() == y).sum().item()
            n += y.numel()
        return hits / n


if __name__ == "__main__":
    cfg = TrainConfig()
    tf = transforms.Compose([transforms.Grayscale(), transforms.Resize((256, 256)), transforms.ToTensor()])
    full = datasets.ImageFolder(Path(cfg.root), transform=tf)
    n_val = len(full) // 10
    train_set, val_set = random_split(full, [len(full) - n_val, n_val])
    Trainer(cfg, SmallCNN(), DataLoader(train_set, cfg.batch_size, shuffle=True, num_workers=4),
            DataLoader(val_set, cfg.batch_size)).fit()
