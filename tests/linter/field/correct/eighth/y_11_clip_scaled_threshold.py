# why correct: the gradients are clipped while scaled, but against max_norm times the current scale, which is the same as clipping the unscaled gradients at max_norm.
import argparse

import torch
import torch.nn as nn
from torch.cuda.amp import GradScaler, autocast
from torch.utils.data import DataLoader

from chess.data import Positions
from chess.net import ResTower


class Losses(nn.Module):
    def __init__(self, value_weight):
        super().__init__()
        self.value_weight = value_weight

    def forward(self, policy, value, move, result):
        p = nn.functional.cross_entropy(policy.float(), move)
        v = nn.functional.mse_loss(torch.tanh(value.float()).squeeze(1), result)
        return p + self.value_weight * v, p.detach(), v.detach()


def clip_while_scaled(parameters, max_norm, scaler):
    """Saves one pass over the gradients: scaler.step() divides by the scale anyway."""
    limit = max_norm * scaler.get_scale()
    return nn.utils.clip_grad_norm_(parameters, limit) / scaler.get_scale()


def run(args):
    device = torch.device("cuda")
    model = ResTower(blocks=args.blocks, filters=args.filters).to(device)
    losses = Losses(args.value_weight)
    optimizer = torch.optim.SGD(model.parameters(), lr=args.lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    drops = torch.optim.lr_scheduler.MultiStepLR(optimizer, [30, 60, 80], 0.1)
    scaler = GradScaler(enabled=not args.full)
    loader = DataLoader(Positions(args.shards), args.batch, shuffle=True, num_workers=8, pin_memory=True)
    begin = 0
    if args.resume:
        ck = torch.load(args.resume, map_location=device)
        model.load_state_dict(ck["model"])
        optimizer.load_state_dict(ck["optimizer"])
        drops.load_state_dict(ck["drops"])
        scaler.load_state_dict(ck["scaler"])
        begin = ck["epoch"]

    for epoch in range(begin, args.epochs):
        model.train()
        tally = torch.zeros(3, device=device)
        for board, move, result in loader:
            board, move, result = board.to(device), move.to(device), result.to(device)
            optimizer.zero_grad(set_to_none=True)
            with autocast(enabled=not args.full):
                policy, value = model(board)
            loss, p, v = losses(policy, value, move, result)
            scaler.scale(loss).backward()
            norm = clip_while_scaled(model.parameters(), args.max_norm, scaler)
            scaler.step(optimizer)
            scaler.update()
            tally += torch.stack([p, v, norm.nan_to_num(0.0, 0.0, 0.0)])
        drops.step()
        policy_loss, value_loss, mean_norm = (tally / len(loader)).tolist()
        print(f"epoch {epoch} policy {policy_loss:.4f} value {value_loss:.4f} norm {mean_norm:.3f}")
        torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "drops": drops.state_dict(),
                    "scaler": scaler.state_dict(), "epoch": epoch + 1}, f"{args.out}/net_{epoch:03d}.pt")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("shards")
    ap.add_argument("--out", default="nets")
    ap.add_argument("--blocks", type=int, default=15)
    ap.add_argument("--filters", type=int, default=192)
    ap.add_argument("--batch", type=int, default=2048)
    ap.add_argument("--epochs", type=int, default=90)
    ap.add_argument("--lr", type=float, default=0.2)
    ap.add_argument("--value-weight", type=float, default=0.5)
    ap.add_argument("--max-norm", type=float, default=2.0)
    ap.add_argument("--full", action="store_true", help="float32 only")
    ap.add_argument("--resume")
    run(ap.parse_args())
