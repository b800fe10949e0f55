# source: verl-project/verl pull request #6150 (the legacy path needed ShardedGradScaler, #4036)
# mistake: float16 training under FSDP uses the plain GradScaler, whose overflow check sees only the local shard, so ranks can disagree on skipping the step and on the scale
# severity: error
import functools
import os

import torch
import torch.distributed as dist
from torch.amp import GradScaler
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp import MixedPrecision, ShardingStrategy
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler

from genome.data import WindowedGenome
from genome.model import Block, GenomeLM

HALF = MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32, buffer_dtype=torch.float32)


def setup():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    return dist.get_rank(), local


def wrap(model, local):
    policy = functools.partial(transformer_auto_wrap_policy, transformer_layer_cls={Block})
    return FSDP(
        model,
        auto_wrap_policy=policy,
        mixed_precision=HALF,
        sharding_strategy=ShardingStrategy.FULL_SHARD,
        device_id=local,
        use_orig_params=True,
        limit_all_gathers=True,
    )


def reduce_mean(x):
    x = x.detach().clone()
    dist.all_reduce(x, op=dist.ReduceOp.AVG)
    return x


class Loop:
    def __init__(self, model, loader, sampler, lr, max_norm, rank):
        self.model = model
        self.loader = loader
        self.sampler = sampler
        self.rank = rank
        self.max_norm = max_norm
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr, betas=(0.9, 0.98))
        self.scaler = GradScaler("cuda", init_scale=2.0**13)  # <- here

    def step(self, tokens):
        tokens = tokens.cuda(non_blocking=True)
        logits = self.model(tokens[:, :-1])
        loss = torch.nn.functional.cross_entropy(
            logits.float().flatten(0, 1), tokens[:, 1:].flatten(), ignore_index=4
        )
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.opt)  # <- here
        norm = self.model.clip_grad_norm_(self.max_norm)
        self.scaler.step(self.opt)  # <- here
        self.scaler.update()
        return loss, norm

    def run(self, epochs):
        for epoch in range(epochs):
            self.sampler.set_epoch(epoch)
            self.model.train()
            for i, tokens in enumerate(self.loader):
                loss, norm = self.step(tokens)
                if i % 50 == 0:
                    mean = reduce_mean(loss)
                    if self.rank == 0:
                        print(f"{epoch}/{i} loss {mean.item():.4f} norm {float(norm):.3f} "
                              f"scale {self.scaler.get_scale():.0f}", flush=True)


def main():
    rank, local = setup()
    torch.manual_seed(0)
    model = wrap(GenomeLM(dim=2048, depth=32, heads=16), local)
    data = WindowedGenome("/data/grch38.npy", window=8192)
    sampler = DistributedSampler(data, shuffle=True)
    loader = DataLoader(data, batch_size=4, sampler=sampler, num_workers=4, pin_memory=True, drop_last=True)
    Loop(model, loader, sampler, lr=2e-4, max_norm=1.0, rank=rank).run(epochs=2)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
