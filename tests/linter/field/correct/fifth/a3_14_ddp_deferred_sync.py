# why correct: gradients are synchronised only in the last micro-batch of a group, and unscale_, clip, step and update follow that backward on every rank alike
import contextlib
import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class SensorTransformer(nn.Module):
    def __init__(self, sensors, dim=256, layers=6, classes=18):
        super().__init__()
        self.patch = nn.Conv1d(sensors, dim, 16, 16)
        self.pos = nn.Parameter(torch.zeros(1, 512, dim))
        layer = nn.TransformerEncoderLayer(dim, 8, 4 * dim, batch_first=True, norm_first=True)
        self.trunk = nn.TransformerEncoder(layer, layers)
        self.head = nn.Linear(dim, classes)

    def forward(self, signal):
        h = self.patch(signal).transpose(1, 2)
        h = self.trunk(h + self.pos[:, : h.shape[1]])
        return self.head(h.mean(1))


def micro_batches(signal, label, parts):
    return list(zip(signal.chunk(parts), label.chunk(parts)))


def train_batch(ddp, opt, scaler, signal, label, parts, max_norm):
    pieces = micro_batches(signal, label, parts)
    total = 0.0
    for i, (s, y) in enumerate(pieces):
        last = i == len(pieces) - 1
        with contextlib.nullcontext() if last else ddp.no_sync():
            with torch.autocast("cuda", dtype=torch.float16):
                logits = ddp(s)
                loss = F.cross_entropy(logits, y, reduction="sum") / label.shape[0]
            scaler.scale(loss).backward()
        total += loss.item()
    scaler.unscale_(opt)
    norm = nn.utils.clip_grad_norm_(ddp.parameters(), max_norm)
    scaler.step(opt)
    scaler.update()
    opt.zero_grad(set_to_none=True)
    return total, norm


def worker(dataset, sensors, epochs=20, batch=512, parts=4):
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    ddp = DDP(SensorTransformer(sensors).to(local), device_ids=[local])
    opt = torch.optim.AdamW(ddp.parameters(), lr=1e-3, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda")
    sampler = torch.utils.data.DistributedSampler(dataset, shuffle=True, drop_last=True)
    loader = torch.utils.data.DataLoader(dataset, batch, sampler=sampler, num_workers=6, drop_last=True)
    for epoch in range(epochs):
        sampler.set_epoch(epoch)
        for signal, label in loader:
            loss, norm = train_batch(ddp, opt, scaler, signal.to(local), label.to(local), parts, 1.0)
        if dist.get_rank() == 0:
            print(epoch, loss, float(norm), scaler.get_scale())
            torch.save(ddp.module.state_dict(), "sensor.pt")
    dist.destroy_process_group()
