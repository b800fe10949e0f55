# style of: pytorch/examples:distributed/FSDP/T5_training.py
# torch: 2.0+
import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from transformers import T5ForConditionalGeneration
from transformers.models.t5.modeling_t5 import T5Block

# the optimizer sees float32 shards; compute and communication use bfloat16, which needs no loss scale
bf16_policy = MixedPrecision(
    param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16, buffer_dtype=torch.bfloat16
)


def train(model, rank, loader, optimizer, epoch, sampler):
    model.train()
    sampler.set_epoch(epoch)
    totals = torch.zeros(2, device=rank)
    for batch in loader:
        batch = {k: v.to(rank) for k, v in batch.items()}
        optimizer.zero_grad()
        loss = model(
            input_ids=batch["source_ids"], attention_mask=batch["source_mask"], labels=batch["target_ids"]
        )["loss"]
        loss.backward()
        model.clip_grad_norm_(1.0)
        optimizer.step()
        totals[0] += loss.detach().float()
        totals[1] += len(batch["source_ids"])
    dist.all_reduce(totals, op=dist.ReduceOp.SUM)
    return totals[0].item() / (len(loader) * dist.get_world_size())


def save(model, rank, path):
    policy = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, policy):
        cpu_state = model.state_dict()
    if rank == 0:
        torch.save(cpu_state, path)


def fsdp_main(args, loader, sampler):
    rank = int(os.environ["LOCAL_RANK"])
    dist.init_process_group("nccl")
    torch.cuda.set_device(rank)
    model = T5ForConditionalGeneration.from_pretrained("t5-base")
    wrap = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={T5Block})
    mp = bf16_policy if torch.cuda.is_bf16_supported() else None
    model = FSDP(model, auto_wrap_policy=wrap, mixed_precision=mp, device_id=rank)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.85)
    for epoch in range(1, args.epochs + 1):
        loss = train(model, rank, loader, optimizer, epoch, sampler)
        scheduler.step()
        if rank == 0:
            print(epoch, loss)
    save(model, rank, "t5.pt")
    dist.destroy_process_group()
