# source: https://github.com/mosaicml/composer/pull/1376
# mistake: resume() restores the scaler's state, but fit() then replaces the scaler by a fresh one, so the restored scale is lost.
# severity: warning
# torch: any
import contextlib

import torch


class State:
    def __init__(self, model, optimizer, precision):
        self.model = model
        self.optimizer = optimizer
        self.precision = precision
        self.epoch = 0
        self.scaler = torch.amp.GradScaler("cuda", enabled=precision == "amp_fp16")

    def state_dict(self):
        names = ("model", "optimizer", "scaler")
        return {"epoch": self.epoch, **{n: getattr(self, n).state_dict() for n in names}}

    def load_state_dict(self, obj):
        self.epoch = obj["epoch"]
        for name in ("model", "optimizer", "scaler"):
            getattr(self, name).load_state_dict(obj[name])


class Trainer:
    def __init__(self, model, optimizer, loader, precision="amp_fp16", load_path=None):
        self.state = State(model.cuda(), optimizer, precision)
        self.loader = loader
        if load_path is not None:
            self.state.load_state_dict(torch.load(load_path, map_location="cuda", weights_only=True))

    def precision_context(self):
        if self.state.precision == "amp_fp16":
            return torch.autocast("cuda", dtype=torch.float16)
        return contextlib.nullcontext()

    def fit(self, duration: int, save_path: str):
        state = self.state
        state.scaler = torch.amp.GradScaler("cuda", enabled=state.precision == "amp_fp16")  # <- here
        while state.epoch < duration:
            state.model.train()
            for batch in self.loader:
                state.optimizer.zero_grad()
                with self.precision_context():
                    loss = state.model.loss(batch)
                state.scaler.scale(loss).backward()
                state.scaler.step(state.optimizer)
                state.scaler.update()
            state.epoch += 1
            torch.save(state.state_dict(), save_path)
