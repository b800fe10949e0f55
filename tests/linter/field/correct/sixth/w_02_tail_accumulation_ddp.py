# why correct: micro-batches are grouped beforehand, each summed loss is divided by the token count of its own group, DDP synchronises only in the last one, and unscale/clip/step/update happen once per group
import contextlib
import itertools
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel


def grouped(iterable, size):
    it = iter(iterable)
    while True:
        chunk = list(itertools.islice(it, size))
        if not chunk:
            return
        yield chunk


def tokens_in(group, pad, device):
    n = torch.tensor(sum(int((b["target"] != pad).sum()) for b in group), device=device, dtype=torch.float32)
    dist.all_reduce(n)
    return n.clamp(min=1.0)


class Translator:
    def __init__(self, net, pad, device, lr=7e-4, accum=6, clip=0.5):
        self.pad, self.device, self.accum, self.clip = pad, device, accum, clip
        self.net = DistributedDataParallel(net.to(device), device_ids=[device.index])
        self.opt = torch.optim.Adam(self.net.parameters(), lr=lr, betas=(0.9, 0.98), eps=1e-9)
        self.scaler = torch.cuda.amp.GradScaler(init_scale=128.0)
        self.world = dist.get_world_size()

    def group_step(self, group):
        total = tokens_in(group, self.pad, self.device)
        nll = torch.zeros((), device=self.device)
        for k, b in enumerate(group):
            final = k == len(group) - 1
            sync = contextlib.nullcontext() if final else self.net.no_sync()
            with sync:
                with torch.cuda.amp.autocast(dtype=torch.float16):
                    logits = self.net(b["source"].to(self.device), b["input"].to(self.device))
                summed = nn.functional.cross_entropy(
                    logits.float().flatten(0, 1), b["target"].to(self.device).flatten(),
                    ignore_index=self.pad, reduction="sum", label_smoothing=0.1)
                # DDP averages over ranks: multiply by world to get a true per-token mean
                self.scaler.scale(summed * self.world / total).backward()
            nll += summed.detach()
        self.scaler.unscale_(self.opt)
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.clip)
        self.scaler.step(self.opt)
        self.scaler.update()
        self.opt.zero_grad(set_to_none=True)
        return nll / total * self.world, norm

    def epoch(self, loader):
        self.net.train()
        for i, group in enumerate(grouped(loader, self.accum)):
            loss, norm = self.group_step(group)
            if i % 100 == 0 and dist.get_rank() == 0:
                print(f"{i}: {loss.item():.3f} |g|={norm.item():.2f} x{self.scaler.get_scale():.0f}")

    def checkpoint(self, path):
        if dist.get_rank() == 0:
            torch.save({"net": self.net.module.state_dict(), "opt": self.opt.state_dict(),
                        "scaler": self.scaler.state_dict()}, path)
        dist.barrier()


def launch(make_net, make_loader, pad=1, epochs=20):
    dist.init_process_group("nccl")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    job = Translator(make_net(), pad, device)
    for e in range(epochs):
        job.epoch(make_loader(e))
        job.checkpoint("translator.pt")
    dist.destroy_process_group()
