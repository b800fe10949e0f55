# source: https://github.com/pytorch/pytorch/pull/43102
# mistake: autocast is thread-local; the replicas' forwards run in worker threads that never enter it, so they run in float32 although the caller is under autocast.
# severity: warning
# torch: any
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.nn as nn
from torch.nn.parallel import replicate, scatter


class ThreadedParallel(nn.Module):
    """Runs one replica of the module per GPU, each in a thread of its own."""

    def __init__(self, module: nn.Module, device_ids):
        super().__init__()
        self.module = module
        self.device_ids = list(device_ids)
        self.pool = ThreadPoolExecutor(max_workers=len(self.device_ids))

    @staticmethod
    def _run(replica, chunk, device):
        with torch.cuda.device(device):
            return replica(chunk)  # <- here

    def forward(self, x):
        chunks = scatter(x, self.device_ids)
        replicas = replicate(self.module, self.device_ids[: len(chunks)])
        futures = [
            self.pool.submit(self._run, replica, chunk, device)  # <- here
            for replica, chunk, device in zip(replicas, chunks, self.device_ids)
        ]
        return torch.cat([f.result().to(self.device_ids[0]) for f in futures])


def main(loader, epochs=10):
    core = nn.Sequential(nn.Conv2d(3, 64, 7, 2, 3), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10))
    net = ThreadedParallel(core.to("cuda:0"), range(torch.cuda.device_count()))
    opt = torch.optim.SGD(net.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for x, y in loader:
            opt.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                out = net(x)
                loss = nn.functional.cross_entropy(out, y.to(out.device))
            scaler.scale(loss).backward()
            scaler.step(opt)
            scaler.update()
        print(epoch, loss.item())
