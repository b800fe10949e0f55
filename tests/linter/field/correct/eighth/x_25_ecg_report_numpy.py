# why correct: bfloat16 outputs are turned to float32 before numpy() and before they are summed up, and autocast gets the bare device type
from __future__ import annotations

import os

import numpy as np
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader

from ecg.records import Leads12


class Squeeze(nn.Module):
    def __init__(self, c, r=8):
        super().__init__()
        self.fc = nn.Sequential(nn.Linear(c, c // r), nn.ReLU(), nn.Linear(c // r, c), nn.Sigmoid())

    def forward(self, x):
        return x * self.fc(x.mean(-1)).unsqueeze(-1)


class EcgNet(nn.Module):
    def __init__(self, findings=27, width=64):
        super().__init__()
        blocks, c = [], 12
        for i, k in enumerate((15, 9, 9, 5, 5)):
            o = width * 2 ** (i // 2)
            blocks += [nn.Conv1d(c, o, k, 2, k // 2), nn.BatchNorm1d(o), nn.ReLU(), Squeeze(o)]
            c = o
        self.body = nn.Sequential(*blocks)
        self.out = nn.Linear(c, findings)

    def forward(self, x):
        return self.out(self.body(x).amax(-1))


class Runner:
    def __init__(self, lr=1e-3):
        self.device = torch.device("cuda", int(os.environ.get("GPU", 0)))
        self.net = EcgNet().to(self.device)
        self.opt = torch.optim.AdamW(self.net.parameters(), lr)
        self.amp = torch.autocast(device_type=self.device.type, dtype=torch.bfloat16)
        self.loss = nn.BCEWithLogitsLoss()

    def train(self, loader: DataLoader) -> float:
        self.net.train()
        total = torch.zeros((), device=self.device, dtype=torch.float32)
        for trace, findings in loader:
            trace, findings = trace.to(self.device), findings.to(self.device).float()
            with self.amp:
                loss = self.loss(self.net(trace), findings)
            self.opt.zero_grad(set_to_none=True)
            loss.backward()
            self.opt.step()
            total += loss.detach()
        return (total / len(loader)).item()

    @torch.no_grad()
    def predict(self, loader: DataLoader) -> tuple[np.ndarray, np.ndarray]:
        self.net.eval()
        probs, truth = [], []
        for trace, findings in loader:
            with self.amp:
                logits = self.net(trace.to(self.device))
            probs.append(torch.sigmoid(logits.float()).cpu().numpy())
            truth.append(findings.numpy())
        return np.concatenate(probs), np.concatenate(truth)


def report(prob: np.ndarray, truth: np.ndarray) -> float:
    usable = [j for j in range(truth.shape[1]) if 0 < truth[:, j].sum() < len(truth)]
    return float(np.mean([roc_auc_score(truth[:, j], prob[:, j]) for j in usable]))


def main(root="ptbxl", epochs=40):
    runner = Runner()
    plan = torch.optim.lr_scheduler.CosineAnnealingLR(runner.opt, epochs)
    train = DataLoader(Leads12(root, "train"), 128, shuffle=True, num_workers=6)
    valid = DataLoader(Leads12(root, "valid"), 256, num_workers=6)
    best = 0.0
    for epoch in range(epochs):
        loss = runner.train(train)
        plan.step()
        auc = report(*runner.predict(valid))
        print(f"{epoch:02d} loss {loss:.4f} auc {auc:.4f}")
        if auc > best:
            best = auc
            torch.save(runner.net.state_dict(), "ecg.pt")


if __name__ == "__main__":
    main()
