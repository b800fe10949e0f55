# style of: MIC-DKFZ/nnUNet:nnunetv2/training/nnUNetTrainer/nnUNetTrainer.py
# torch: 2.0+
from contextlib import nullcontext as dummy_context

import torch
from torch import autocast
from torch.cuda.amp import GradScaler


class SegTrainer:
    def __init__(self, network, loss, device=torch.device("cuda"), initial_lr=1e-2, num_epochs=1000):
        self.device = device
        self.network = network.to(device)
        self.loss = loss
        self.num_epochs = num_epochs
        self.current_epoch = 0
        self.initial_lr = initial_lr
        # only CUDA training is mixed precision
        self.grad_scaler = GradScaler() if self.device.type == "cuda" else None
        self.optimizer = torch.optim.SGD(
            self.network.parameters(), initial_lr, weight_decay=3e-5, momentum=0.99, nesterov=True
        )

    def poly_lr(self):
        lr = self.initial_lr * (1 - self.current_epoch / self.num_epochs) ** 0.9
        for group in self.optimizer.param_groups:
            group["lr"] = lr

    def amp_context(self):
        if self.device.type == "cuda":
            return autocast(self.device.type, enabled=True)
        return dummy_context()

    def train_step(self, batch):
        data = batch["data"].to(self.device, non_blocking=True)
        target = [t.to(self.device, non_blocking=True) for t in batch["target"]]
        self.optimizer.zero_grad(set_to_none=True)
        with self.amp_context():
            output = self.network(data)
            l = self.loss(output, target)

        if self.grad_scaler is not None:
            self.grad_scaler.scale(l).backward()
            self.grad_scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 12)
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()
        else:
            l.backward()
            torch.nn.utils.clip_grad_norm_(self.network.parameters(), 12)
            self.optimizer.step()
        return {"loss": l.detach().cpu().numpy()}

    def run_epoch(self, loader):
        self.network.train()
        self.poly_lr()
        losses = [self.train_step(batch)["loss"] for batch in loader]
        self.current_epoch += 1
        return sum(losses) / len(losses)

    def save_checkpoint(self, filename):
        torch.save(
            {
                "network_weights": self.network.state_dict(),
                "optimizer_state": self.optimizer.state_dict(),
                "grad_scaler_state": self.grad_scaler.state_dict() if self.grad_scaler is not None else None,
                "current_epoch": self.current_epoch,
            },
            filename,
        )

    def load_checkpoint(self, filename):
        checkpoint = torch.load(filename, map_location=self.device)
        self.network.load_state_dict(checkpoint["network_weights"])
        self.optimizer.load_state_dict(checkpoint["optimizer_state"])
        self.current_epoch = checkpoint["current_epoch"]
        if self.grad_scaler is not None and checkpoint["grad_scaler_state"] is not None:
            self.grad_scaler.load_state_dict(checkpoint["grad_scaler_state"])
