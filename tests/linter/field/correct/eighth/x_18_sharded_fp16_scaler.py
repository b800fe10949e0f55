# why correct: float16 FSDP uses ShardedGradScaler, unscales first, and clips through the FSDP module, which knows the norm over all shards
import functools
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.fsdp import FullStateDictConfig, MixedPrecision, StateDictType
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import transformer_auto_wrap_policy
from torch.utils.data import DataLoader, DistributedSampler

from imputation.tables import MaskedRecords


class RecordModel(nn.Module):
    def __init__(self, fields, values, dim=1024, depth=16, heads=16):
        super().__init__()
        self.value = nn.Embedding(values, dim)
        self.field = nn.Parameter(torch.randn(fields, dim) * 0.02)
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(dim, heads, 4 * dim, batch_first=True, norm_first=True) for _ in range(depth)
        )
        self.out = nn.Linear(dim, values)

    def forward(self, ids):
        h = self.value(ids) + self.field
        for layer in self.layers:
            h = layer(h)
        return self.out(h)


def wrap(model):
    return FSDP(
        model,
        auto_wrap_policy=functools.partial(
            transformer_auto_wrap_policy, transformer_layer_cls={nn.TransformerEncoderLayer}
        ),
        mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
        device_id=torch.cuda.current_device(),
    )


def save(model, path):
    with FSDP.state_dict_type(model, StateDictType.FULL_STATE_DICT, FullStateDictConfig(True, True)):
        state = model.state_dict()
    if dist.get_rank() == 0:
        torch.save(state, path)


def main(fields=180, values=5000, epochs=6):
    dist.init_process_group("nccl")
    torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    torch.manual_seed(0)
    model = wrap(RecordModel(fields, values))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.05)
    scaler = ShardedGradScaler(init_scale=2.0**14)
    data = MaskedRecords("records.parquet")
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 32, sampler=sampler, num_workers=4, drop_last=True)

    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for step, (ids, target) in enumerate(loader):
            ids, target = ids.cuda(non_blocking=True), target.cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            logits = model(ids)
            loss = F.cross_entropy(logits.float().flatten(0, 1), target.flatten(), ignore_index=-100)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            norm = model.clip_grad_norm_(1.0)
            scaler.step(optimizer)
            scaler.update()
            if dist.get_rank() == 0 and step % 50 == 0:
                print(epoch, step, loss.item(), float(norm))
    save(model, "records.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
