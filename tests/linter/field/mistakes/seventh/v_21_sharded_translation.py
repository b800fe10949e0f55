# source: pytorch/pytorch issue #64632 and facebookresearch/fairscale issue #754 https://github.com/facebookresearch/fairscale/issues/754
# mistake: float16 FSDP with the ordinary GradScaler: ranks see infs only in their own shard, so some step and others skip (ShardedGradScaler needed)
# severity: error
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.amp import GradScaler  # <- here
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy


class Translator(nn.Module):
    def __init__(self, vocab=40000, dim=1024):
        super().__init__()
        self.src, self.tgt = nn.Embedding(vocab, dim), nn.Embedding(vocab, dim)
        self.core = nn.Transformer(dim, 16, 12, 12, 4096, batch_first=True, norm_first=True)
        self.out = nn.Linear(dim, vocab)

    def forward(self, s, t):
        causal = torch.ones(t.size(1), t.size(1), dtype=torch.bool, device=t.device).triu(1)
        h = self.core(self.src(s), self.tgt(t), tgt_mask=causal, src_key_padding_mask=s.eq(0))
        return self.out(h)


def shard(model):
    layers = {nn.TransformerEncoderLayer, nn.TransformerDecoderLayer}
    half = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float16)
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(transformer_auto_wrap_policy, transformer_layer_cls=layers),
        mixed_precision=half,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=torch.cuda.current_device(),
    )


def train(loader, steps):
    model = shard(Translator())
    opt = torch.optim.AdamW(model.parameters(), lr=5e-4, betas=(0.9, 0.98))
    sched = torch.optim.lr_scheduler.LambdaLR(opt, lambda n: min((n + 1) / 4000, (4000 / (n + 1)) ** 0.5))
    scaler = GradScaler("cuda")  # <- here
    for step, (s, t) in zip(range(steps), loader):
        s, t = s.cuda(), t.cuda()
        opt.zero_grad()
        logits = model(s, t[:, :-1])
        loss = F.cross_entropy(logits.float().flatten(0, 1), t[:, 1:].flatten(), ignore_index=0, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.unscale_(opt)  # <- here
        model.clip_grad_norm_(1.0)
        scaler.step(opt)  # <- here
        scaler.update()
        sched.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(step, loss.item())


if __name__ == "__main__":
    from wmt import sharded_loader

    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    train(sharded_loader(dist.get_rank(), dist.get_world_size()), 100_000)
    dist.destroy_process_group()
