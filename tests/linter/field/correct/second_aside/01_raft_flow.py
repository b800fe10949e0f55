"""
# style of: princeton-vl/RAFT:train.py
# correct: unscale_, clip, step and update in the documented order; the one-cycle schedule advances only if the step was not skipped.
# torch: 1.9+
"""
import argparse

import numpy as np
import torch
import torch.nn as nn
import torch.optim as optim

from core.raft import RAFT
from core.datasets import fetch_dataloader

MAX_FLOW = 400


def sequence_loss(flow_preds, flow_gt, valid, gamma=0.8):
    mag = torch.sum(flow_gt**2, dim=1).sqrt()
    valid = (valid >= 0.5) & (mag < MAX_FLOW)
    loss = 0.0
    for i, pred in enumerate(flow_preds):
        weight = gamma ** (len(flow_preds) - i - 1)
        loss += weight * (valid[:, None] * (pred.float() - flow_gt).abs()).mean()
    epe = torch.sum((flow_preds[-1].float() - flow_gt) ** 2, dim=1).sqrt().view(-1)[valid.view(-1)]
    return loss, epe.mean().item()


def train(args):
    model = nn.DataParallel(RAFT(args), device_ids=args.gpus).cuda()
    loader = fetch_dataloader(args)
    optimizer = optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.wdecay, eps=args.epsilon)
    scheduler = optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, args.num_steps + 100, pct_start=0.05, cycle_momentum=False, anneal_strategy="linear"
    )
    scaler = torch.cuda.amp.GradScaler(enabled=args.mixed_precision)
    if args.stage != "chairs":
        model.module.freeze_bn()

    total_steps, keep_training = 0, True
    while keep_training:
        for image1, image2, flow, valid in loader:
            optimizer.zero_grad()
            image1, image2, flow, valid = (x.cuda() for x in (image1, image2, flow, valid))
            if args.add_noise:
                stdv = np.random.uniform(0.0, 5.0)
                image1 = (image1 + stdv * torch.randn_like(image1)).clamp(0.0, 255.0)
                image2 = (image2 + stdv * torch.randn_like(image2)).clamp(0.0, 255.0)

            # autocast stands inside the model, around its encoder and update block
            flow_preds = model(image1, image2, iters=args.iters)
            loss, epe = sequence_loss(flow_preds, flow, valid, args.gamma)

            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip)
            old_scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            if scaler.get_scale() >= old_scale:
                scheduler.step()

            total_steps += 1
            if total_steps % 100 == 0:
                print(f"[{total_steps:6d}] loss {loss.item():.4f} epe {epe:.3f} lr {scheduler.get_last_lr()[0]:.2e}")
            if total_steps > args.num_steps:
                keep_training = False
                break


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--stage", default="chairs")
    parser.add_argument("--lr", type=float, default=4e-4)
    parser.add_argument("--num_steps", type=int, default=100000)
    parser.add_argument("--mixed_precision", action="store_true")
    parser.add_argument("--gpus", type=int, nargs="+", default=[0])
    parser.add_argument("--wdecay", type=float, default=1e-4)
    parser.add_argument("--epsilon", type=float, default=1e-8)
    parser.add_argument("--clip", type=float, default=1.0)
    parser.add_argument("--gamma", type=float, default=0.8)
    parser.add_argument("--iters", type=int, default=12)
    parser.add_argument("--add_noise", action="store_true")
    train(parser.parse_args())
