# source: the distributed loop of fairscale's tests, re-expressed: no_sync, then gradients are reduced by hand
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def fit(batches, rank):
    model = DistributedDataParallel(nn.Linear(8, 1).to(rank), device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in batches:
        optimizer.zero_grad()
        with model.no_sync():
            loss = model(batch.to(rank)).square().mean()
            loss.backward()
        for parameter in model.parameters():
            dist.all_reduce(parameter.grad)
            parameter.grad /= dist.get_world_size()
        optimizer.step()
