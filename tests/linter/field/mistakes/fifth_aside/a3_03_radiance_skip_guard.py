# source: https://github.com/Haian-Jin/LVSM/pull/19
# mistake: when the norm guard rejects a step, the loop goes on without scaler.update(), so the next unscale_() raises
# severity: error
import argparse
import logging

import torch
import torch.nn.functional as F
from torch import nn

log = logging.getLogger("radiance")


def build_net(width):
    layers = [nn.Linear(6, width), nn.GELU()]
    for _ in range(4):
        layers += [nn.Linear(width, width), nn.GELU()]
    layers.append(nn.Linear(width, 3))
    return nn.Sequential(*layers)


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--rays", required=True)
    p.add_argument("--width", type=int, default=512)
    p.add_argument("--steps", type=int, default=100_000)
    p.add_argument("--batch", type=int, default=8192)
    p.add_argument("--lr", type=float, default=4e-4)
    p.add_argument("--clip", type=float, default=1.0)
    p.add_argument("--reject-above", type=float, default=5.0)
    p.add_argument("--warmup", type=int, default=1000)
    return p.parse_args()


def main():
    args = parse()
    data = torch.load(args.rays)
    rays, rgb = data["rays"].cuda(), data["rgb"].cuda()
    net = build_net(args.width).cuda()
    optim = torch.optim.AdamW(net.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scaler = torch.amp.GradScaler("cuda")
    rejected = 0

    for it in range(args.steps):
        idx = torch.randint(0, rays.shape[0], (args.batch,), device="cuda")
        optim.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            pred = torch.sigmoid(net(rays[idx]).float())
            loss = F.mse_loss(pred, rgb[idx])

        scaler.scale(loss).backward()
        scaler.unscale_(optim)
        norm = nn.utils.clip_grad_norm_(net.parameters(), args.clip).item()

        if it > args.warmup and not norm < args.reject_above:
            rejected += 1
            log.warning("iteration %d: gradient norm %.2f, step rejected", it, norm)
            continue  # <- here

        scaler.step(optim)
        scaler.update()  # <- here

        if it % 200 == 0:
            log.info("iteration %d loss %.5f norm %.3f rejected %d", it, loss.item(), norm, rejected)

    torch.save(net.state_dict(), "radiance.pt")


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    main()
