# source: milesial/Pytorch-UNet pull request #470 (same mistake: TorchSSL/TorchSSL pull request #59)
# mistake: adaptive gradient clipping is applied to gradients that still carry the loss scale, so every gradient is clipped down and the steps become vanishingly small
# severity: error
"""Piano transcription: CNN + BiGRU, frame-wise onset prediction."""
import argparse
from functools import partial

import torch
import torch.nn as nn
from torch.utils.data import DataLoader, TensorDataset


class Transcriber(nn.Module):
    def __init__(self, n_mels=229, hidden=256, keys=88):
        super().__init__()
        self.front = nn.Sequential(
            nn.Conv1d(n_mels, hidden, 5, padding=2), nn.GroupNorm(8, hidden), nn.GELU(),
            nn.Conv1d(hidden, hidden, 5, padding=2), nn.GroupNorm(8, hidden), nn.GELU(),
        )
        self.rnn = nn.GRU(hidden, hidden, batch_first=True, bidirectional=True)
        self.head = nn.Linear(2 * hidden, keys)

    def forward(self, mel):
        h = self.front(mel).transpose(1, 2)
        h, _ = self.rnn(h)
        return self.head(h)


def row_norm(t):
    if t.ndim <= 1:
        return t.norm(p=2)
    return t.flatten(1).norm(p=2, dim=1).view(-1, *([1] * (t.ndim - 1)))


@torch.no_grad()
def limit_update_ratio(parameters, ratio, floor=1e-3):
    """Keep each unit's gradient norm below ratio * weight norm (Brock et al., 2021)."""
    for w in parameters:
        if w.grad is None:
            continue
        allowed = row_norm(w).clamp_(min=floor).mul_(ratio)
        g = row_norm(w.grad)
        shrunk = w.grad * (allowed / g.clamp(min=1e-6))
        w.grad.copy_(torch.where(g > allowed, shrunk, w.grad))


def run_epoch(model, batches, criterion, opt, loss_scaler, post_backward, device):
    model.train()
    seen, running = 0, 0.0
    for mel, roll in batches:
        mel = mel.to(device, non_blocking=True)
        roll = roll.to(device, non_blocking=True)
        opt.zero_grad(set_to_none=True)
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            logits = model(mel)
            loss = criterion(logits, roll)
        loss_scaler.scale(loss).backward()  # <- here
        post_backward(model.parameters())  # <- here
        loss_scaler.step(opt)
        loss_scaler.update()
        seen += mel.size(0)
        running += loss.item() * mel.size(0)
    return running / seen


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--features", default="maestro_small.pt")
    ap.add_argument("--epochs", type=int, default=30)
    ap.add_argument("--agc", type=float, default=0.02)
    ap.add_argument("--lr", type=float, default=6e-4)
    args = ap.parse_args()

    device = torch.device("cuda")
    blob = torch.load(args.features)
    loader = DataLoader(TensorDataset(blob["mel"], blob["roll"]), batch_size=16,
                        shuffle=True, pin_memory=True, drop_last=True)

    model = Transcriber().to(device)
    opt = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, nesterov=True)
    loss_scaler = torch.amp.GradScaler("cuda")
    criterion = nn.BCEWithLogitsLoss(pos_weight=torch.tensor(3.0, device=device))
    clipper = partial(limit_update_ratio, ratio=args.agc)

    for ep in range(args.epochs):
        avg = run_epoch(model, loader, criterion, opt, loss_scaler, clipper, device)
        print(f"epoch {ep:02d} | bce {avg:.4f} | scale {loss_scaler.get_scale():.0f}")
    torch.save(model.state_dict(), "transcriber_final.pt")


if __name__ == "__main__":
    main()
