# source: https://github.com/huggingface/accelerate/issues/641
# mistake: accelerator.clip_grad_norm_ runs for every micro batch inside accumulate() without asking sync_gradients; each call unscales, so under fp16 the second raises.
# severity: error
# torch: any
import torch
from accelerate import Accelerator
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class MeanMeter:
    def __init__(self):
        self.total, self.n = 0.0, 0

    def update(self, value, n):
        self.total += value * n
        self.n += n

    @property
    def avg(self):
        return self.total / max(self.n, 1)


class Trainer:
    def __init__(self, args, model, loader):
        self.args = args
        self._accelerator = Accelerator(
            mixed_precision="fp16", gradient_accumulation_steps=args["gradient_accumulation_steps"]
        )
        optimizer = torch.optim.AdamW(model.parameters(), lr=args["lr"])
        self.model, self.optimizer, self.loader = self._accelerator.prepare(model, optimizer, loader)
        self.loss_meter = MeanMeter()

    def train_one_epoch(self):
        self.model.train()
        for x, y in self.loader:
            with self._accelerator.accumulate(self.model):
                loss = nn.functional.cross_entropy(self.model(x), y)
                self._accelerator.backward(loss)
                self._accelerator.clip_grad_norm_(self.model.parameters(), self.args["max_grad_norm"])  # <- here
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.loss_meter.update(loss.item(), len(y))
        return self.loss_meter.avg


if __name__ == "__main__":
    cfg = dict(lr=3e-4, gradient_accumulation_steps=4, max_grad_norm=1.0)
    data = TensorDataset(torch.randn(1024, 20), torch.randint(0, 5, (1024,)))
    net = nn.Sequential(nn.Linear(20, 128), nn.ReLU(), nn.Linear(128, 5))
    trainer = Trainer(cfg, net, DataLoader(data, batch_size=32))
    for ep in range(3):
        print(ep, trainer.train_one_epoch())
