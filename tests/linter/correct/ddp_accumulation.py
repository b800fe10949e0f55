from contextlib import nullcontext

import torch
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP


def train(net, loader, optimizer, accum):
    model = DDP(net)
    scaler = torch.amp.GradScaler("cuda")
    optimizer.zero_grad()
    for step, (x, y) in enumerate(loader):
        sync = (step + 1) % accum == 0
        ctx = nullcontext() if sync else model.no_sync()
        with ctx:
            with torch.autocast("cuda", dtype=torch.float16):
                loss = F.cross_entropy(model(x), y) / accum
            scaler.scale(loss).backward()
        if sync:
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
