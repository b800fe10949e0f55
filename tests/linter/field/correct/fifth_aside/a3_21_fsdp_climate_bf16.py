# why correct: FSDP with bfloat16 parameters and float32 reduction needs no scaler, keeps float32 shards for the optimizer and clips with its own method; the fp16 branch takes ShardedGradScaler
import argparse
import os
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Block(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.heads = heads

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        a = nn.functional.scaled_dot_product_attention(q, k, v)
        x = x + self.proj(a.transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


class ClimateViT(nn.Module):
    def __init__(self, fields, dim=1536, depth=24, heads=16, patch=4):
        super().__init__()
        self.patchify = nn.Conv2d(fields, dim, patch, patch)
        self.blocks = nn.ModuleList(Block(dim, heads) for _ in range(depth))
        self.unpatch = nn.ConvTranspose2d(dim, fields, patch, patch)

    def forward(self, x):
        h = self.patchify(x)
        shape = h.shape[-2:]
        h = h.flatten(2).transpose(1, 2)
        for block in self.blocks:
            h = block(h)
        return self.unpatch(h.transpose(1, 2).unflatten(2, shape))


def precision(name):
    dtype = {"bf16": torch.bfloat16, "fp16": torch.float16}[name]
    return MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32, buffer_dtype=dtype)


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--data", required=True)
    p.add_argument("--precision", choices=["bf16", "fp16"], default="bf16")
    p.add_argument("--steps", type=int, default=100_000)
    p.add_argument("--lr", type=float, default=3e-4)
    args = p.parse_args()

    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    data = torch.load(args.data, mmap=True)
    sampler = torch.utils.data.DistributedSampler(data)
    loader = torch.utils.data.DataLoader(data, 2, sampler=sampler, num_workers=4)

    model = FSDP(
        ClimateViT(data[0][0].shape[0]), device_id=local, mixed_precision=precision(args.precision),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        auto_wrap_policy=partial(transformer_auto_wrap_policy, transformer_layer_cls={Block}),
    )
    opt = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95))
    scaler = ShardedGradScaler(enabled=args.precision == "fp16")

    step = 0
    while step < args.steps:
        sampler.set_epoch(step)
        for now, later in loader:
            now, later = now.to(local), later.to(local)
            opt.zero_grad(set_to_none=True)
            change = model(now).float()
            loss = (change - (later - now)).square().mean()
            scaler.scale(loss).backward()
            scaler.unscale_(opt)
            model.clip_grad_norm_(1.0)
            scaler.step(opt)
            scaler.update()
            step += 1
            if step % 50 == 0 and dist.get_rank() == 0:
                print(step, loss.item())
            if step >= args.steps:
                break
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
