# source: https://github.com/WatChMaL/WatChMaL/pull/106
# mistake: training runs under autocast but validation does not, so the model is judged in another precision than it is trained in and takes more time and memory.
# severity: warning
# torch: any
import numpy as np
import torch


class ClassifierEngine:
    def __init__(self, model, device, criterion):
        self.model = model.to(device)
        self.device = device
        self.criterion = criterion
        self.optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
        self.use_amp = False
        self.scaler = None

    def configure_amp(self, dtype="float16"):
        self.use_amp = True
        self.amp_dtype = getattr(torch, dtype)
        self.scaler = torch.amp.GradScaler("cuda", enabled=dtype == "float16")

    def forward(self, data, target):
        out = self.model(data)
        return {"loss": self.criterion(out, target), "accuracy": (out.argmax(-1) == target).float().mean()}

    def train_step(self, data, target):
        self.optimizer.zero_grad()
        if self.use_amp:
            with torch.autocast("cuda", dtype=self.amp_dtype):
                metrics = self.forward(data, target)
            self.scaler.scale(metrics["loss"]).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            metrics = self.forward(data, target)
            metrics["loss"].backward()
            self.optimizer.step()
        return {k: v.item() for k, v in metrics.items()}

    @torch.no_grad()
    def validate(self, loader):
        self.model.eval()
        rows = []
        for data, target in loader:
            metrics = self.forward(data.to(self.device), target.to(self.device))  # <- here
            rows.append([metrics["loss"].item(), metrics["accuracy"].item()])
        return np.mean(rows, axis=0)

    def train(self, train_loader, val_loader, epochs):
        for epoch in range(epochs):
            self.model.train()
            for data, target in train_loader:
                self.train_step(data.to(self.device), target.to(self.device))
            print(epoch, self.validate(val_loader))
