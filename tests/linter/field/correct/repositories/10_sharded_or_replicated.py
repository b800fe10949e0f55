# source: a trainer with either wrapper, re-expressed: only one branch shards, and there clipping is FSDP's
import torch
from torch.distributed.fsdp import FullyShardedDataParallel
from torch.nn.parallel import DistributedDataParallel


def fit(net, batches, rank, shard):
    if shard:
        model = FullyShardedDataParallel(net.to(rank))
    else:
        model = DistributedDataParallel(net.to(rank), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    for batch in batches:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(batch.to(rank)).square().mean()
        loss.backward()
        if hasattr(model, "clip_grad_norm_"):
            model.clip_grad_norm_(1.0)
        else:
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
