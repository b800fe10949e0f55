# why correct: the scaler is one of the registered objects whose state_dict is saved and restored with all the others, and it exists before the checkpoint is loaded
import dataclasses
import pathlib
import typing as tp

import torch
import torch.nn.functional as F


class HasState(tp.Protocol):
    def state_dict(self) -> dict: ...
    def load_state_dict(self, state: dict) -> tp.Any: ...


@dataclasses.dataclass
class Progress:
    epoch: int = 0
    best: float = 0.0

    def state_dict(self):
        return dataclasses.asdict(self)

    def load_state_dict(self, state):
        for k, v in state.items():
            setattr(self, k, v)


class Experiment:
    def __init__(self, net, folder, lr=0.1, epochs=90):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._registry: dict[str, HasState] = {}
        self.net = self.register("net", net.cuda())
        self.opt = self.register("opt", torch.optim.SGD(net.parameters(), lr, momentum=0.9, weight_decay=1e-4))
        self.sched = self.register("sched", torch.optim.lr_scheduler.CosineAnnealingLR(self.opt, epochs))
        self.amp = self.register("amp", torch.amp.GradScaler("cuda"))
        self.at = self.register("progress", Progress())
        self.epochs = epochs

    def register(self, name, thing):
        if name in self._registry:
            raise KeyError(name)
        self._registry[name] = thing
        return thing

    @property
    def last(self):
        return self.folder / "last.ckpt"

    def commit(self):
        tmp = self.last.with_suffix(".tmp")
        torch.save({k: v.state_dict() for k, v in self._registry.items()}, tmp)
        tmp.replace(self.last)

    def recover(self):
        if not self.last.exists():
            return
        blob = torch.load(self.last, map_location="cuda")
        for k, v in self._registry.items():
            v.load_state_dict(blob[k])

    def one_epoch(self, loader):
        self.net.train()
        for img, label in loader:
            with torch.autocast("cuda"):
                loss = F.cross_entropy(self.net(img.cuda()), label.cuda(), label_smoothing=0.1)
            self.opt.zero_grad(set_to_none=True)
            self.amp.scale(loss).backward()
            self.amp.step(self.opt)
            self.amp.update()

    @torch.no_grad()
    def accuracy(self, loader):
        self.net.eval()
        good = n = 0
        for img, label in loader:
            with torch.autocast("cuda"):
                guess = self.net(img.cuda()).argmax(1)
            good += (guess.cpu() == label).sum().item()
            n += len(label)
        return good / max(n, 1)

    def run(self, train, val):
        self.recover()
        while self.at.epoch < self.epochs:
            self.one_epoch(train)
            self.sched.step()
            acc = self.accuracy(val)
            self.at.epoch += 1
            if acc > self.at.best:
                self.at.best = acc
                torch.save(self.net.state_dict(), self.folder / "weights_only.pt")
            self.commit()
