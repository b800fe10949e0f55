# why correct: the scaler is saved and restored with everything else through a registry of stateful objects, though no line mentions scaler.state_dict()
import signal
from pathlib import Path

import torch
import torch.nn.functional as F


class Registry(dict):
    def snapshot(self):
        return {name: obj.state_dict() for name, obj in self.items()}

    def restore(self, snap):
        for name, obj in self.items():
            if name in snap:
                obj.load_state_dict(snap[name])


class Progress:
    def __init__(self):
        self.epoch, self.step = 0, 0

    def state_dict(self):
        return vars(self).copy()

    def load_state_dict(self, d):
        vars(self).update(d)


class Session:
    def __init__(self, net, folder, lr=1e-3, epochs=100):
        self.file = Path(folder) / "state.pt"
        self.net = net.cuda()
        self.opt = torch.optim.AdamW(net.parameters(), lr=lr)
        self.sched = torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, epochs)
        self.amp = torch.amp.GradScaler("cuda", growth_interval=1000)
        self.progress = Progress()
        self.epochs = epochs
        self.stateful = Registry(net=self.net, opt=self.opt, sched=self.sched, amp=self.amp, progress=self.progress)
        self.stop = False
        signal.signal(signal.SIGTERM, self._on_term)

    def _on_term(self, *_):
        self.stop = True

    def save(self):
        tmp = self.file.with_suffix(".tmp")
        torch.save(self.stateful.snapshot(), tmp)
        tmp.replace(self.file)

    def load(self):
        if self.file.exists():
            self.stateful.restore(torch.load(self.file, map_location="cuda"))

    def train_step(self, x, y):
        self.opt.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(self.net(x), y)
        self.amp.scale(loss).backward()
        self.amp.step(self.opt)
        self.amp.update()
        self.progress.step += 1
        return loss.detach()

    def fit(self, loader):
        self.load()
        while self.progress.epoch < self.epochs and not self.stop:
            for x, y in loader:
                loss = self.train_step(x.cuda(), y.cuda())
            self.sched.step()
            self.progress.epoch += 1
            self.save()
            print(self.progress.epoch, loss.item())
