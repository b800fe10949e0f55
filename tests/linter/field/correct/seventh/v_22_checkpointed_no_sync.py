# why correct: recomputation in the backward restores the forward's autocast state by itself, no_sync covers only non-final micro-batches, and the scaler acts once per window
import contextlib
import os

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.checkpoint import checkpoint


class Res3d(nn.Module):
    def __init__(self, c):
        super().__init__()
        self.n1, self.c1 = nn.GroupNorm(8, c), nn.Conv3d(c, c, 3, padding=1)
        self.n2, self.c2 = nn.GroupNorm(8, c), nn.Conv3d(c, c, 3, padding=1)

    def forward(self, x):
        h = self.c1(torch.relu(self.n1(x)))
        return x + self.c2(torch.relu(self.n2(h)))


class Volume(nn.Module):
    def __init__(self, classes=14, c=32, n=8):
        super().__init__()
        self.inp = nn.Conv3d(1, c, 3, 2, 1)
        self.blocks = nn.ModuleList(Res3d(c) for _ in range(n))
        self.out = nn.ConvTranspose3d(c, classes, 2, 2)

    def forward(self, x):
        x = self.inp(x)
        for b in self.blocks:
            x = checkpoint(b, x, use_reentrant=False)
        return self.out(x)


def windows(loader, k):
    buf = []
    for b in loader:
        buf.append(b)
        if len(buf) == k:
            yield buf
            buf = []
    if buf:
        yield buf


def main(k=4, epochs=200):
    dist.init_process_group("nccl")
    dev = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(dev)
    from ct import sharded

    net = DDP(Volume().to(dev), device_ids=[dev])
    opt = torch.optim.SGD(net.parameters(), 0.01, momentum=0.99, nesterov=True)
    scaler = torch.amp.GradScaler("cuda")
    for e in range(epochs):
        for group in windows(sharded(dist.get_rank(), e), k):
            opt.zero_grad(set_to_none=True)
            for j, (vol, lab) in enumerate(group):
                final = j == len(group) - 1
                with contextlib.nullcontext() if final else net.no_sync():
                    with torch.autocast("cuda", dtype=torch.float16):
                        logits = net(vol.to(dev))
                        loss = nn.functional.cross_entropy(logits, lab.to(dev)) / len(group)
                    scaler.scale(loss).backward()
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 12.0)
            scaler.step(opt)
            scaler.update()
        if dev == 0:
            print(e, loss.item() * len(group), scaler.get_scale())
            torch.save({"net": net.module.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}, "ct.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
