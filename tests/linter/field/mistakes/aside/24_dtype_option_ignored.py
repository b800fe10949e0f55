# source: https://github.com/datawhalechina/happy-llm/pull/195
# mistake: autocast is entered without a dtype, so --dtype bfloat16 is ignored: the forward runs in float16 while the scaler is switched off.
# severity: error
# torch: any
import argparse
import math
from contextlib import nullcontext

import torch
from torch.utils.data import DataLoader

from data import PretrainDataset
from k_model import ModelConfig, Transformer

parser = argparse.ArgumentParser(description="Tiny-LLM pretraining")
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--batch_size", type=int, default=64)
parser.add_argument("--learning_rate", type=float, default=2e-4)
parser.add_argument("--device", type=str, default="cuda:0")
parser.add_argument("--dtype", type=str, default="bfloat16", choices=["float16", "bfloat16"])
parser.add_argument("--grad_clip", type=float, default=1.0)
args = parser.parse_args()

device_type = "cuda" if "cuda" in args.device else "cpu"
ctx = nullcontext() if device_type == "cpu" else torch.amp.autocast("cuda")  # <- here

model = Transformer(ModelConfig(dim=1024, n_layers=18)).to(args.device)
optimizer = torch.optim.Adam(model.parameters(), lr=args.learning_rate)
scaler = torch.amp.GradScaler(device_type, enabled=args.dtype == "float16")
loader = DataLoader(PretrainDataset("seq_monkey.jsonl"), batch_size=args.batch_size, num_workers=8)


def get_lr(it, total):
    return 0.1 * args.learning_rate + 0.45 * args.learning_rate * (1 + math.cos(math.pi * it / total))


for epoch in range(args.epochs):
    for step, (X, Y, loss_mask) in enumerate(loader):
        X, Y, loss_mask = X.to(args.device), Y.to(args.device), loss_mask.to(args.device)
        for group in optimizer.param_groups:
            group["lr"] = get_lr(epoch * len(loader) + step, args.epochs * len(loader))
        with ctx:
            per_token = model(X, Y).last_loss
            loss = (per_token * loss_mask.view(-1)).sum() / loss_mask.sum()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.grad_clip)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
