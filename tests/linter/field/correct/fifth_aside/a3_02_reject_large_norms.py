# why correct: a step whose norm is too large is left out, but scaler.update() runs in every iteration, so each unscale_() is followed by an update
import argparse
import math

import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter


class OceanNet(nn.Module):
    def __init__(self, fields, ch):
        super().__init__()
        conv = lambda i, o: nn.Conv2d(i, o, 3, padding=1)
        self.net = nn.Sequential(conv(fields, ch), nn.SiLU(), conv(ch, ch), nn.SiLU(), conv(ch, ch), nn.SiLU(), conv(ch, fields))

    def forward(self, x):
        return x + self.net(x)


def cycle(loader):
    while True:
        yield from loader


def main(args):
    data = torch.load(args.pairs)
    loader = torch.utils.data.DataLoader(
        torch.utils.data.TensorDataset(data["now"], data["next"]), args.batch, shuffle=True, drop_last=True, pin_memory=True
    )
    net = OceanNet(data["now"].shape[1], args.channels).cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr)
    scaler = torch.amp.GradScaler("cuda")
    board = SummaryWriter(args.logs)
    rejected = 0

    for it, (now, nxt) in zip(range(args.iterations), cycle(loader)):
        now, nxt = now.cuda(non_blocking=True), nxt.cuda(non_blocking=True)
        opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.float16):
            loss = nn.functional.mse_loss(net(now), nxt)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)
        norm = nn.utils.clip_grad_norm_(net.parameters(), args.clip).item()

        outlier = math.isfinite(norm) and it > args.warmup and norm > args.reject
        if outlier:
            rejected += 1
        else:
            scaler.step(opt)
        scaler.update()

        if it % 100 == 0:
            board.add_scalar("loss", loss.item(), it)
            board.add_scalar("norm", norm, it)
            board.add_scalar("rejected", rejected, it)
            board.add_scalar("scale", scaler.get_scale(), it)

    torch.save(net.state_dict(), args.out)


if __name__ == "__main__":
    p = argparse.ArgumentParser()
    p.add_argument("pairs")
    p.add_argument("--out", default="ocean.pt")
    p.add_argument("--logs", default="runs/ocean")
    p.add_argument("--iterations", type=int, default=50_000)
    p.add_argument("--batch", type=int, default=16)
    p.add_argument("--channels", type=int, default=128)
    p.add_argument("--lr", type=float, default=2e-4)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--reject", type=float, default=20.0)
    p.add_argument("--warmup", type=int, default=2000)
    main(p.parse_args())
