# source: PrimeIntellect-ai/OpenDiloco PR #6
# mistake: the gradients of an FSDP model are sharded, torch's clip function sees only this rank's part and each rank scales by another factor
# severity: error
import functools
import os

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler
from transformers import LlamaConfig, LlamaForCausalLM, get_cosine_schedule_with_warmup
from transformers.models.llama.modeling_llama import LlamaDecoderLayer

from codelm.packed import PackedTokens

GLOBAL_BATCH = 512
MICRO = 4
STEPS = 20_000


def setup():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return dist.get_rank(), dist.get_world_size()


def shard(model):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={LlamaDecoderLayer})
    precision = MixedPrecision(
        param_dtype=torch.bfloat16, reduce_dtype=torch.float32, buffer_dtype=torch.float32
    )
    return FSDP(  # <- here
        model,
        auto_wrap_policy=policy,
        mixed_precision=precision,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.cuda.current_device(),
        use_orig_params=True,
    )


def endless(loader):
    epoch = 0
    while True:
        loader.sampler.set_epoch(epoch)
        yield from loader
        epoch += 1


def main():
    rank, world = setup()
    model = shard(LlamaForCausalLM(LlamaConfig(hidden_size=1024, intermediate_size=2816, num_hidden_layers=24)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1, betas=(0.9, 0.95))
    schedule = get_cosine_schedule_with_warmup(optimizer, 1000, STEPS)
    data = PackedTokens("code.bin", 2048)
    batches = endless(DataLoader(data, MICRO, sampler=DistributedSampler(data), num_workers=2, drop_last=True))
    accum = GLOBAL_BATCH // (MICRO * world)

    for step in range(STEPS):
        mean = torch.zeros((), device="cuda")
        for _ in range(accum):
            ids = next(batches).cuda(non_blocking=True)
            loss = model(input_ids=ids, labels=ids).loss / accum
            loss.backward()
            mean += loss.detach().float()
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # <- here
        optimizer.step()
        schedule.step()
        optimizer.zero_grad(set_to_none=True)

        if step % 10 == 0:
            dist.all_reduce(mean, op=dist.ReduceOp.AVG)
            if rank == 0:
                print(f"{step} loss {mean.item():.4f} norm {norm.item():.3f} lr {schedule.get_last_lr()[0]:.2e}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
