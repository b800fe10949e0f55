# why correct: the checkpoint stores everything registered with the registry, the scaler among it, although no line names the scaler's state; it is built before the restore
import pathlib
import random
from collections import OrderedDict

import numpy as np
import torch
from torch import nn


class Randomness:
    """Gives the generators the interface of a stateful object."""

    def state_dict(self):
        return {"py": random.getstate(), "np": np.random.get_state(), "cpu": torch.get_rng_state(),
                "gpu": torch.cuda.get_rng_state_all()}

    def load_state_dict(self, sd):
        random.setstate(sd["py"])
        np.random.set_state(sd["np"])
        torch.set_rng_state(sd["cpu"])
        torch.cuda.set_rng_state_all(sd["gpu"])


class Counter:
    def __init__(self):
        self.value = 0

    def state_dict(self):
        return {"value": self.value}

    def load_state_dict(self, sd):
        self.value = sd["value"]


class Registry:
    def __init__(self):
        self._parts = OrderedDict()

    def __setattr__(self, name, value):
        if not name.startswith("_") and hasattr(value, "state_dict"):
            self._parts[name] = value
        super().__setattr__(name, value)

    def store(self, path):
        path = pathlib.Path(path)
        tmp = path.with_suffix(".part")
        torch.save({k: p.state_dict() for k, p in self._parts.items()}, tmp)
        tmp.replace(path)

    def restore(self, path):
        blob = torch.load(path, map_location="cpu", weights_only=False)
        absent = self._parts.keys() - blob.keys()
        if absent:
            raise KeyError(f"{path} lacks {sorted(absent)}")
        for k, p in self._parts.items():
            p.load_state_dict(blob[k])


class Denoise(Registry):
    def __init__(self, net: nn.Module, lr=1e-3, half_life=5000):
        super().__init__()
        self.net = net.cuda()
        self.optim = torch.optim.Adam(self.net.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.ExponentialLR(self.optim, 0.5 ** (1 / half_life))
        self.amp = torch.amp.GradScaler("cuda")
        self.step_count = Counter()
        self.rng = Randomness()

    def learn(self, clean, sigma):
        clean = clean.cuda(non_blocking=True)
        noisy = clean + sigma * torch.randn_like(clean)
        with torch.autocast("cuda"):
            residual = self.net(noisy)
        loss = nn.functional.mse_loss(residual.float(), noisy - clean)
        self.optim.zero_grad(set_to_none=True)
        self.amp.scale(loss).backward()
        self.amp.step(self.optim)
        self.amp.update()
        self.sched.step()
        self.step_count.value += 1
        return loss.item()


def run(net, loader, folder, total=100_000):
    folder = pathlib.Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    job = Denoise(net)
    last = folder / "last.pt"
    if last.exists():
        job.restore(last)
    while job.step_count.value < total:
        for clean in loader:
            loss = job.learn(clean, sigma=random.uniform(0.02, 0.2))
            n = job.step_count.value
            if n % 1000 == 0:
                print(n, f"{loss:.5f}")
                job.store(last)
            if n >= total:
                break
