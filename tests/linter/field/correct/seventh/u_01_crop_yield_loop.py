# why correct: the clipping helper is only reached through finish_step, which unscales the gradients first
import argparse
import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class YieldNet(nn.Module):
    def __init__(self, weather_dim=12, soil_dim=20, hidden=128):
        super().__init__()
        self.rnn = nn.GRU(weather_dim, hidden, num_layers=2, batch_first=True)
        self.soil = nn.Sequential(nn.Linear(soil_dim, hidden), nn.ReLU())
        self.head = nn.Linear(2 * hidden, 1)

    def forward(self, weather, soil):
        out, _ = self.rnn(weather)
        return self.head(torch.cat([out[:, -1], self.soil(soil)], dim=-1)).squeeze(-1)


def limit_gradients(parameters, max_norm):
    return nn.utils.clip_grad_norm_(parameters, max_norm)


def finish_step(scaler, optimizer, model, max_norm):
    scaler.unscale_(optimizer)
    norm = limit_gradients(model.parameters(), max_norm)
    scaler.step(optimizer)
    scaler.update()
    return norm


def backward(scaler, optimizer, loss):
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()


def run_epoch(model, batches, optimizer, scaler, max_norm, amp):
    model.train()
    random.shuffle(batches)
    seen, total = 0, 0.0
    for weather, soil, target in batches:
        weather, soil, target = weather.cuda(), soil.cuda(), target.cuda()
        with autocast(enabled=amp):
            pred = model(weather, soil)
            loss = F.smooth_l1_loss(pred.float(), target)
        backward(scaler, optimizer, loss)
        norm = finish_step(scaler, optimizer, model, max_norm)
        total += loss.item() * target.numel()
        seen += target.numel()
    return total / seen, float(norm)


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--data", default="county_batches.pt")
    ap.add_argument("--amp", action="store_true")
    ap.add_argument("--max-norm", type=float, default=0.5)
    args = ap.parse_args()
    batches = torch.load(args.data)
    model = YieldNet().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler(enabled=args.amp)
    for epoch in range(80):
        loss, norm = run_epoch(model, batches, optimizer, scaler, args.max_norm, args.amp)
        print(f"{epoch:3d} loss {loss:.4f} last norm {norm:.3f}")


if __name__ == "__main__":
    main()
