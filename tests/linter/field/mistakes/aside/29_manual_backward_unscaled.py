# source: https://github.com/Lightning-AI/pytorch-lightning/issues/4148
# mistake: manual_backward() never multiplies the loss by the scale although optimizer_step() unscales and steps through the scaler, which raises on first use.
# severity: error
# torch: any (2.13: AssertionError, _scale is None)
import torch
import torch.nn as nn


class Accelerator:
    def __init__(self, precision=32, device="cuda"):
        self.device = device
        self.precision = precision
        self.scaler = torch.amp.GradScaler(device) if precision == 16 else None

    def autocast(self):
        return torch.autocast(self.device, dtype=torch.float16, enabled=self.precision == 16)

    def manual_backward(self, loss, retain_graph=False):
        loss.backward(retain_graph=retain_graph)  # <- here

    def optimizer_step(self, optimizer, clip_params=None, max_norm=1.0):
        if self.scaler is None:
            if clip_params is not None:
                nn.utils.clip_grad_norm_(clip_params, max_norm)
            optimizer.step()
            return
        self.scaler.unscale_(optimizer)
        if clip_params is not None:
            nn.utils.clip_grad_norm_(clip_params, max_norm)
        self.scaler.step(optimizer)
        self.scaler.update()


def train(model, loader, accelerator, epochs):
    model.to(accelerator.device).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(epochs):
        for x, y in loader:
            optimizer.zero_grad()
            with accelerator.autocast():
                loss = nn.functional.cross_entropy(model(x.to(accelerator.device)), y.to(accelerator.device))
            accelerator.manual_backward(loss)
            accelerator.optimizer_step(optimizer, list(model.parameters()))


if __name__ == "__main__":
    ds = torch.utils.data.TensorDataset(torch.randn(256, 32), torch.randint(0, 2, (256,)))
    train(nn.Linear(32, 2), torch.utils.data.DataLoader(ds, batch_size=64), Accelerator(precision=16), 2)
