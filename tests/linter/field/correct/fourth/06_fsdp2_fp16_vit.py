"""torchrun --nproc_per_node=8 06_fsdp2_fp16_vit.py   (torch >= 2.6)"""
import os

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn as nn
import torch.nn.functional as F
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.utils.data import DataLoader, DistributedSampler

from shards import ImageShards

DIM, DEPTH, HEADS, PATCH, CLASSES = 1280, 32, 16, 14, 21_841
BATCH, ACCUM, STEPS, LR = 32, 4, 90_000, 1e-3
CKPT = "ckpt/vit-h"


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.n1, self.n2 = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.qkv, self.out = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.mlp = nn.Sequential(nn.Linear(DIM, 4 * DIM), nn.GELU(), nn.Linear(4 * DIM, DIM))

    def forward(self, x):
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in self.qkv(self.n1(x)).chunk(3, -1))
        x = x + self.out(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        return x + self.mlp(self.n2(x))


class ViT(nn.Module):
    def __init__(self, size=224):
        super().__init__()
        self.patch = nn.Conv2d(3, DIM, PATCH, PATCH)
        self.pos = nn.Parameter(torch.randn(1, (size // PATCH) ** 2, DIM) * 0.02)
        self.blocks = nn.ModuleList(Block() for _ in range(DEPTH))
        self.norm, self.head = nn.LayerNorm(DIM), nn.Linear(DIM, CLASSES)

    def forward(self, x):
        x = self.patch(x).flatten(2).transpose(1, 2) + self.pos
        for blk in self.blocks:
            x = blk(x)
        return self.head(self.norm(x).mean(1))


def build(device):
    mesh = init_device_mesh("cuda", (dist.get_world_size(),))
    policy = MixedPrecisionPolicy(param_dtype=torch.float16, reduce_dtype=torch.float32, output_dtype=torch.float32)
    model = ViT().to(device)
    for blk in model.blocks:
        fully_shard(blk, mesh=mesh, mp_policy=policy)
    return fully_shard(model, mesh=mesh, mp_policy=policy)


def checkpoint_state(model, optimizer, scaler, step):
    weights, optim = get_state_dict(model, optimizer)
    return {"model": weights, "optim": optim, "scaler": scaler.state_dict(), "step": step}


def main():
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    torch.manual_seed(0)
    model = build(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LR, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda", init_scale=2.0**13, growth_interval=1000)
    step = 0
    if os.path.isdir(CKPT):
        state = checkpoint_state(model, optimizer, scaler, step)
        dcp.load(state, checkpoint_id=CKPT)
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        scaler.load_state_dict(state["scaler"])
        step = state["step"]

    data = ImageShards("in21k/train")
    sampler = DistributedSampler(data, drop_last=True)
    loader = DataLoader(data, BATCH, sampler=sampler, num_workers=8, pin_memory=True, drop_last=True)
    micro, epoch = 0, 0
    while step < STEPS:
        sampler.set_epoch(epoch)
        for images, labels in loader:
            images, labels = images.to(device, non_blocking=True), labels.to(device, non_blocking=True)
            micro += 1
            last = micro % ACCUM == 0
            model.set_requires_gradient_sync(last)
            loss = F.cross_entropy(model(images), labels, label_smoothing=0.1)
            scaler.scale(loss / ACCUM).backward()
            if not last:
                continue
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            step += 1
            if step % 1000 == 0:
                dcp.save(checkpoint_state(model, optimizer, scaler, step), checkpoint_id=CKPT)
                norm = norm.full_tensor().item()
                if dist.get_rank() == 0:
                    print(f"{step} loss {loss.item():.3f} norm {norm:.2f} scale {scaler.get_scale():.0f}", flush=True)
        epoch += 1
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
