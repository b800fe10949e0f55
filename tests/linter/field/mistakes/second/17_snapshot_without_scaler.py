"""
# source: https://github.com/pfnet/pytorch-pfn-extras/issues/690
# mistake: the snapshot holds models, optimizers and counters but not the GradScaler, so a resumed run starts again from the initial loss scale.
# severity: warning
# torch: any
"""
import os

import torch


class ExtensionsManager:
    def __init__(self, models, optimizers, max_epochs, out):
        self.models = models
        self.optimizers = optimizers
        self.max_epochs = max_epochs
        self.out = out
        self.epoch = 0
        self.iteration = 0

    def state_dict(self):
        return {  # <- here
            "epoch": self.epoch,
            "iteration": self.iteration,
            "models": {k: m.state_dict() for k, m in self.models.items()},
            "optimizers": {k: o.state_dict() for k, o in self.optimizers.items()},
        }

    def load_state_dict(self, state):
        self.epoch, self.iteration = state["epoch"], state["iteration"]
        for k, m in self.models.items():
            m.load_state_dict(state["models"][k])
        for k, o in self.optimizers.items():
            o.load_state_dict(state["optimizers"][k])

    def snapshot(self):
        torch.save(self.state_dict(), os.path.join(self.out, f"snapshot_{self.iteration}"))


class Logic:
    def __init__(self, device="cuda"):
        self.device = device
        self._grad_scaler = torch.cuda.amp.GradScaler()

    def train_step(self, models, optimizers, batch):
        x, t = (v.to(self.device) for v in batch)
        optimizers["main"].zero_grad()
        with torch.cuda.amp.autocast():
            loss = torch.nn.functional.nll_loss(models["main"](x).log_softmax(-1), t)
        self._grad_scaler.scale(loss).backward()
        self._grad_scaler.step(optimizers["main"])
        self._grad_scaler.update()
        return loss.detach()


def main(model, loader, out, resume=None):
    model = model.cuda()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    manager = ExtensionsManager({"main": model}, {"main": optimizer}, 50, out)
    logic = Logic()
    if resume:
        manager.load_state_dict(torch.load(resume, map_location="cuda"))
    while manager.epoch < manager.max_epochs:
        model.train()
        for batch in loader:
            logic.train_step(manager.models, manager.optimizers, batch)
            manager.iteration += 1
        manager.epoch += 1
        manager.snapshot()
