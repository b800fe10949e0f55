# style of: catalyst-team/catalyst:catalyst/engines/amp.py
# torch: 1.6+
import torch
import torch.cuda.amp as amp


class DeviceEngine:
    def __init__(self, device="cuda"):
        self.device = device

    def sync_device(self, obj):
        return obj.to(self.device)

    def zero_grad(self, loss, model, optimizer):
        model.zero_grad()

    def backward_loss(self, loss, model, optimizer):
        loss.backward()

    def optimizer_step(self, loss, model, optimizer):
        optimizer.step()

    def autocast(self):
        return amp.autocast(enabled=False)

    def save(self, path, **parts):
        torch.save({k: v.state_dict() for k, v in parts.items()}, path)


class AMPEngine(DeviceEngine):
    def __init__(self, device="cuda", scaler_kwargs=None):
        super().__init__(device)
        self.scaler = amp.GradScaler(**(scaler_kwargs or {}))

    def backward_loss(self, loss, model, optimizer):
        self.scaler.scale(loss).backward()

    def optimizer_step(self, loss, model, optimizer):
        self.scaler.step(optimizer)
        self.scaler.update()

    def autocast(self):
        return amp.autocast()

    def save(self, path, **parts):
        super().save(path, scaler=self.scaler, **parts)


class Runner:
    def __init__(self, engine, model, criterion, optimizer):
        self.engine = engine
        self.model = engine.sync_device(model)
        self.criterion = criterion
        self.optimizer = optimizer

    def handle_batch(self, batch):
        x, y = (engine_t.to(self.engine.device) for engine_t in batch)
        with self.engine.autocast():
            loss = self.criterion(self.model(x), y)
        self.batch_loss = loss
        if self.model.training:
            self.engine.zero_grad(loss, self.model, self.optimizer)
            self.engine.backward_loss(loss, self.model, self.optimizer)
            self.engine.optimizer_step(loss, self.model, self.optimizer)

    def run_loader(self, loader, train):
        self.model.train(train)
        total = 0.0
        with torch.set_grad_enabled(train):
            for batch in loader:
                self.handle_batch(batch)
                total += self.batch_loss.item()
        return total / len(loader)
