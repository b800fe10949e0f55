# why correct: fp16 FSDP uses ShardedGradScaler, unscales, and clips with the wrapped model's own clip_grad_norm_, which reduces the norm over all ranks
import os
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, MixedPrecision, StateDictType
from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler
from torch.distributed.fsdp.wrap import ModuleWrapPolicy


@dataclass
class Hyper:
    width: int = 2048
    depth: int = 24
    heads: int = 16
    lr: float = 2e-4
    max_norm: float = 1.0
    steps: int = 30_000


class SatelliteMAE(nn.Module):
    def __init__(self, h: Hyper, bands=13, patch=16):
        super().__init__()
        self.patch = patch
        self.embed = nn.Conv2d(bands, h.width, patch, patch)
        layer = lambda: nn.TransformerEncoderLayer(h.width, h.heads, 4 * h.width, batch_first=True, norm_first=True)
        self.layers = nn.ModuleList(layer() for _ in range(h.depth))
        self.head = nn.Linear(h.width, bands * patch * patch)

    def forward(self, img, keep):
        x = self.embed(img).flatten(2).transpose(1, 2) * keep.unsqueeze(-1)
        for layer in self.layers:
            x = layer(x)
        return self.head(x)


class Updater:
    def __init__(self, model, h: Hyper):
        self.model, self.h = model, h
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=h.lr, betas=(0.9, 0.95))
        self.scaler = ShardedGradScaler()

    def accumulate(self, loss):
        self.scaler.scale(loss).backward()

    def commit(self):
        self.scaler.unscale_(self.optimizer)
        norm = self.model.clip_grad_norm_(self.h.max_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return norm


def objective(model, img, keep, patch=16):
    pred = model(img.half(), keep.half()).float()
    target = F.unfold(img, patch, stride=patch).transpose(1, 2)
    err = (pred - target).square().mean(-1)
    hidden = 1.0 - keep
    return (err * hidden).sum() / hidden.sum().clamp(min=1.0)


def main(loader):
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    h = Hyper()
    model = FullyShardedDataParallel(
        SatelliteMAE(h), device_id=rank, use_orig_params=True,
        auto_wrap_policy=ModuleWrapPolicy({nn.TransformerEncoderLayer}),
        mixed_precision=MixedPrecision(param_dtype=torch.float16, reduce_dtype=torch.float32),
    )
    updater = Updater(model, h)
    for step, (img, keep) in zip(range(h.steps), loader):
        loss = objective(model, img.cuda().float(), keep.cuda().float())
        updater.accumulate(loss)
        norm = updater.commit()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(step, loss.item(), norm.item())
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.FULL_STATE_DICT):
        weights = model.state_dict()
    if dist.get_rank() == 0:
        torch.save({"model": weights, "hyper": asdict(h)}, "mae.pt")
    dist.destroy_process_group()
