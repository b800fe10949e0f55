# why correct: every stateful object, the scaler included, is registered and saved and restored in one generic loop
from pathlib import Path

import torch
from torch import nn
from torch.amp import GradScaler, autocast


class Registry:
    def __init__(self, folder):
        self.folder = Path(folder)
        self.items = {}

    def add(self, **objects):
        for name, obj in objects.items():
            if not (hasattr(obj, "state_dict") and hasattr(obj, "load_state_dict")):
                raise TypeError(f"{name} has no state")
            self.items[name] = obj

    def save(self, step):
        self.folder.mkdir(parents=True, exist_ok=True)
        payload = {name: obj.state_dict() for name, obj in self.items.items()}
        payload["step"] = step
        torch.save(payload, self.folder / "latest.pt")

    def load(self):
        path = self.folder / "latest.pt"
        if not path.exists():
            return 0
        payload = torch.load(path, map_location="cuda")
        for name, obj in self.items.items():
            obj.load_state_dict(payload[name])
        return payload["step"]


class SeismicJob:
    def __init__(self, net, loader, folder):
        self.net = net.cuda()
        self.loader = loader
        self.opt = torch.optim.SGD(self.net.parameters(), lr=0.02, momentum=0.9, nesterov=True)
        self.sched = torch.optim.lr_scheduler.MultiStepLR(self.opt, [20_000, 40_000])
        self.amp = GradScaler("cuda", growth_interval=500)
        self.registry = Registry(folder)
        self.registry.add(net=self.net, opt=self.opt, sched=self.sched, amp=self.amp)
        self.loss_fn = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 8.0, 8.0]).cuda())

    def _one(self, trace, phase):
        self.opt.zero_grad(set_to_none=True)
        with autocast("cuda", dtype=torch.float16):
            loss = self.loss_fn(self.net(trace), phase)
        self.amp.scale(loss).backward()
        self.amp.step(self.opt)
        self.amp.update()
        self.sched.step()
        return loss.item()

    def run(self, total=60_000):
        step = self.registry.load()
        self.net.train()
        while step < total:
            for trace, phase in self.loader:
                value = self._one(trace.cuda(), phase.cuda())
                step += 1
                if step % 500 == 0:
                    print(step, value, self.amp.get_scale())
                    self.registry.save(step)
                if step >= total:
                    break
        self.registry.save(step)
