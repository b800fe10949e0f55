import torch
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler


def train(module, loader, criterion):
    policy = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float16)
    model = FSDP(module, mixed_precision=policy)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-4)
    scaler = ShardedGradScaler()
    for x, y in loader:
        optimizer.zero_grad()
        loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        model.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
