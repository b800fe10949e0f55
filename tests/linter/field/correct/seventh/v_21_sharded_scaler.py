# why correct: under float16 FSDP the sharded scaler shares found_inf between ranks, and clipping uses the FSDP module's own method after unscale_
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import size_based_auto_wrap_policy


class Protein(nn.Module):
    def __init__(self, d=1280, n=24):
        super().__init__()
        self.emb = nn.Embedding(33, d)
        lay = nn.TransformerEncoderLayer(d, 20, 4 * d, batch_first=True, norm_first=True, activation="gelu")
        self.trunk = nn.TransformerEncoder(lay, n, enable_nested_tensor=False)
        self.out = nn.Linear(d, 33)

    def forward(self, ids):
        return self.out(self.trunk(self.emb(ids), src_key_padding_mask=ids == 1))


class Job:
    def __init__(self, steps, micro):
        self.rank = int(os.environ["LOCAL_RANK"])
        torch.cuda.set_device(self.rank)
        self.steps, self.micro = steps, micro
        self.model = FullyShardedDataParallel(
            Protein(),
            auto_wrap_policy=functools.partial(size_based_auto_wrap_policy, min_num_params=5_000_000),
            mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
            device_id=self.rank,
            use_orig_params=True,
        )
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=1e-4, weight_decay=0.01)
        self.scaler = ShardedGradScaler(init_scale=2.0 ** 13)

    def micro_step(self, ids, target):
        logits = self.model(ids)
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=-100)
        self.scaler.scale(loss / self.micro).backward()
        return loss.detach()

    def run(self, feed):
        for step in range(self.steps):
            self.opt.zero_grad()
            total = sum(self.micro_step(*(t.cuda() for t in next(feed))) for _ in range(self.micro))
            self.scaler.unscale_(self.opt)
            norm = self.model.clip_grad_norm_(1.0)
            self.scaler.step(self.opt)
            self.scaler.update()
            if step % 50 == 0 and dist.get_rank() == 0:
                print(step, (total / self.micro).item(), norm.item(), self.scaler.get_scale())


if __name__ == "__main__":
    from uniref import masked_batches

    dist.init_process_group("nccl")
    Job(100_000, 2).run(masked_batches(dist.get_rank(), dist.get_world_size()))
    dist.destroy_process_group()
