# re-expressed from github.com/pytorch/pytorch issue 102731: float16 FSDP run drove the ordinary GradScaler, whose inf check looks at the local shard only
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import (
    FullStateDictConfig,
    FullyShardedDataParallel as FSDP,
    MixedPrecision,
    ShardingStrategy,
    StateDictType,
)
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler

from corpus import PackedTokens

VOCAB, CTX, DIM, DEPTH, HEADS = 32_000, 2048, 1536, 24, 16
BATCH, LR, CLIP, STEPS = 8, 2e-4, 1.0, 50_000


class DecoderLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM, bias=False), nn.Linear(DIM, DIM, bias=False)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        q, k, v = self.qkv(self.n1(x)).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (q, k, v))
        att = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(att.transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


class Decoder(nn.Module):
    def __init__(self):
        super().__init__()
        self.tok, self.pos = nn.Embedding(VOCAB, DIM), nn.Embedding(CTX, DIM)
        self.layers = nn.ModuleList(DecoderLayer() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, VOCAB, bias=False)

    def forward(self, idx):
        x = self.tok(idx) + self.pos.weight[: idx.size(1)]
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def save_weights(model, path, rank):
    cfg = FullStateDictConfig(offload_to_cpu=True, rank0_only=True)
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, cfg):
        weights = model.state_dict()
    if rank == 0:
        torch.save(weights, path)


def main():
    dist.init_process_group("nccl")
    rank = dist.get_rank()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(1234)

    model = FSDP(
        Decoder(),
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={DecoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=device,
        use_orig_params=True,
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, betas=(0.9, 0.95), weight_decay=0.1)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0 ** 14)  # <- here

    data = PackedTokens("data/train.bin", CTX)
    sampler = DistributedSampler(data, shuffle=True, drop_last=True)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=4, pin_memory=True)

    step, epoch = 0, 0
    while step < STEPS:
        sampler.set_epoch(epoch)
        for tokens in loader:
            tokens = tokens.to(device, non_blocking=True)
            logits = model(tokens[:, :-1])
            loss = F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = model.clip_grad_norm_(CLIP)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if rank == 0 and step % 20 == 0:
                print(f"{step} loss {loss.item():.4f} norm {norm.item():.3f} scale {scaler.get_scale():.0f}", flush=True)
            if step % 5000 == 0:
                save_weights(model, f"weights_{step}.pt", rank)
            if step >= STEPS:
                break
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
