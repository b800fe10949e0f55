# source: https://github.com/facebookresearch/fairscale/issues/754
# mistake: sharded gradients are checked by the ordinary GradScaler, so a rank that finds an infinity skips its step and halves its scale while the others do not; the ranks drift apart or hang. FSDP needs ShardedGradScaler.
# severity: error
# torch: any (FSDP1; FSDP2 uses the ordinary scaler)
import functools
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler

from lm_data import TokenBlocks
from lm_model import RobertaLM


def setup():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    return rank


def train(rank, model, loader, sampler, optimizer, scaler, epochs):
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        model.train()
        total = torch.zeros(2, device=rank)
        for ids, labels in loader:
            ids, labels = ids.to(rank), labels.to(rank)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                logits = model(ids)
                loss = F.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=-100)
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            total += torch.stack([loss.detach(), torch.ones_like(loss)])
        dist.all_reduce(total)
        if rank == 0:
            print(epoch, (total[0] / total[1]).item())


def main():
    rank = setup()
    policy = functools.partial(size_based_auto_wrap_policy, min_num_params=1_000_000)
    model = FSDP(RobertaLM(), auto_wrap_policy=policy, device_id=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4)
    scaler = torch.amp.GradScaler("cuda")  # <- here
    data = TokenBlocks("wikitext", block=512)
    sampler = DistributedSampler(data, shuffle=True)
    train(rank, model, DataLoader(data, batch_size=16, sampler=sampler), sampler, optimizer, scaler, epochs=10)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
