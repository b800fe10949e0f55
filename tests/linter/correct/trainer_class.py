import contextlib

import torch


class Trainer:
    def __init__(self, model, optimizer, criterion, precision="fp16"):
        self.model, self.optimizer, self.criterion = model, optimizer, criterion
        self.precision = precision
        self.scaler = torch.amp.GradScaler("cuda", enabled=precision == "fp16")

    def autocast(self):
        if self.precision == "fp32":
            return contextlib.nullcontext()
        dtype = torch.float16 if self.precision == "fp16" else torch.bfloat16
        return torch.autocast("cuda", dtype=dtype)

    def training_step(self, batch):
        with self.autocast():
            output = self.model(batch[0])
            return self.criterion(output, batch[1])

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()
        return norm

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            for batch in loader:
                loss = self.training_step(batch)
                self.scaler.scale(loss).backward()
                self.optimizer_step()
            self.evaluate(loader)
            self.save(epoch)

    @torch.no_grad()
    def evaluate(self, loader):
        self.model.eval()
        for batch in loader:
            with self.autocast():
                self.model(batch[0])
        self.model.train()

    def save(self, epoch):
        torch.save(
            {
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
                "epoch": epoch,
            },
            f"{epoch}.pt",
        )
