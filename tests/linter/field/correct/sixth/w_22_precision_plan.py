# why correct: one function turns the flag into dtype, autocast and scaler together (scaler only for float16), and what leaves for numpy is float32
import argparse
import contextlib
import functools
from typing import NamedTuple

import numpy as np
import torch
from torch import nn


class Plan(NamedTuple):
    dtype: torch.dtype
    context: object
    scaler: torch.amp.GradScaler


def plan_for(flag: str, device: torch.device) -> Plan:
    if flag == "auto":
        if device.type != "cuda":
            flag = "fp32"
        else:
            flag = "bf16" if torch.cuda.is_bf16_supported() else "fp16"
    dtype = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}[flag]
    if dtype is torch.float32:
        context = contextlib.nullcontext
    else:
        context = functools.partial(torch.autocast, device_type=device.type, dtype=dtype)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype is torch.float16)
    return Plan(dtype, context, scaler)


class Recommender(nn.Module):
    def __init__(self, items, d=128, layers=2, length=100):
        super().__init__()
        self.item = nn.Embedding(items + 1, d, padding_idx=0)
        self.pos = nn.Embedding(length, d)
        layer = nn.TransformerEncoderLayer(d, 4, 2 * d, 0.2, batch_first=True, norm_first=True)
        self.enc = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)

    def forward(self, seq):
        n = seq.size(1)
        causal = torch.triu(torch.ones(n, n, dtype=torch.bool, device=seq.device), 1)
        h = self.item(seq) + self.pos(torch.arange(n, device=seq.device))
        return self.enc(h, mask=causal)


def sampled_loss(net, seq, nxt, negatives):
    h = net(seq)
    cand = torch.cat([nxt.unsqueeze(-1), negatives], -1)
    logits = torch.einsum("bld,blcd->blc", h, net.item(cand)).float()
    ce = nn.functional.cross_entropy(logits.flatten(0, 1), logits.new_zeros(seq.numel(), dtype=torch.long),
                                     reduction="none")
    real = (nxt != 0).flatten()
    return (ce * real).sum() / real.sum().clamp(min=1)


def train_epoch(net, loader, opt, plan, device):
    net.train()
    for seq, nxt, neg in loader:
        seq, nxt, neg = seq.to(device), nxt.to(device), neg.to(device)
        with plan.context():
            loss = sampled_loss(net, seq, nxt, neg)
        opt.zero_grad(set_to_none=True)
        plan.scaler.scale(loss).backward()
        plan.scaler.unscale_(opt)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        plan.scaler.step(opt)
        plan.scaler.update()
    return loss.item()


@torch.no_grad()
def user_vectors(net, loader, plan, device) -> np.ndarray:
    net.eval()
    rows = []
    for seq, *_ in loader:
        with plan.context():
            h = net(seq.to(device))[:, -1]
        rows.append(h.float().cpu().numpy())
    return np.concatenate(rows)


def main(items, train_dl, user_dl):
    ap = argparse.ArgumentParser()
    ap.add_argument("--precision", default="auto", choices=["auto", "fp32", "fp16", "bf16"])
    ap.add_argument("--epochs", type=int, default=20)
    args = ap.parse_args()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    plan = plan_for(args.precision, device)
    net = Recommender(items).to(device)
    opt = torch.optim.Adam(net.parameters(), lr=1e-3)
    for e in range(args.epochs):
        print(e, train_epoch(net, train_dl, opt, plan, device))
    np.save("users.npy", user_vectors(net, user_dl, plan, device))
