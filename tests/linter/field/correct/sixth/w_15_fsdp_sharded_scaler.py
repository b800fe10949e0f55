# why correct: FSDP1 in float16 uses ShardedGradScaler, clips with the FSDP method after unscale_, and in bfloat16 the same scaler is disabled; reductions are float32
import argparse
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullStateDictConfig, FullyShardedDataParallel, MixedPrecision, StateDictType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def shard(net, block_cls, kind, local):
    mp = None
    if kind in DTYPES:
        mp = MixedPrecision(param_dtype=DTYPES[kind], reduce_dtype=torch.float32, buffer_dtype=torch.float32)
    return FullyShardedDataParallel(net, auto_wrap_policy=ModuleWrapPolicy({block_cls}), mixed_precision=mp,
                                    device_id=local, use_orig_params=True)


def full_weights(net):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FullyShardedDataParallel.state_dict_type(net, StateDictType.FULL_STATE_DICT, cfg):
        return net.state_dict()


def train_step(net, opt, scaler, batch, max_norm):
    tokens = batch.cuda(non_blocking=True)
    logits = net(tokens[:, :-1])
    loss = nn.functional.cross_entropy(logits.float().reshape(-1, logits.size(-1)), tokens[:, 1:].reshape(-1))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    norm = net.clip_grad_norm_(max_norm)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    return loss.detach(), norm


def main(build, block_cls, loader, sampler):
    ap = argparse.ArgumentParser()
    ap.add_argument("--precision", choices=["fp16", "bf16", "fp32"], default="fp16")
    ap.add_argument("--lr", type=float, default=1e-4)
    ap.add_argument("--epochs", type=int, default=1)
    ap.add_argument("--max-norm", type=float, default=1.0)
    args = ap.parse_args()

    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    net = shard(build(), block_cls, args.precision, local)
    opt = torch.optim.AdamW(net.parameters(), lr=args.lr, weight_decay=0.1)
    scaler = ShardedGradScaler(enabled=args.precision == "fp16")

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        net.train()
        for i, batch in enumerate(loader):
            loss, norm = train_step(net, opt, scaler, batch, args.max_norm)
            if i % 20 == 0:
                dist.all_reduce(loss, op=dist.ReduceOp.AVG)
                if dist.get_rank() == 0:
                    print(i, round(loss.item(), 4), round(float(norm), 3))
        weights = full_weights(net)
        if dist.get_rank() == 0:
            torch.save(weights, f"weights_{epoch}.pt")
        dist.barrier()
    dist.destroy_process_group()
