# source: https://github.com/facebookresearch/fairchem/pull/617
# mistake: the scaled loss is divided by get_scale() after update() may have changed it, so the reported loss is off by a factor of two on those steps.
# severity: warning
# torch: any
import logging

import torch
from torch_geometric.loader import DataLoader


class ForcesTrainer:
    def __init__(self, config, model, train_set, device="cuda"):
        self.config = config
        self.device = device
        self.model = model.to(device)
        self.loader = DataLoader(train_set, batch_size=config["batch_size"], shuffle=True)
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=config["lr_initial"], amsgrad=True)
        self.scaler = torch.amp.GradScaler(device) if config["amp"] else None
        self.metrics = []

    def _compute_loss(self, out, batch):
        energy = torch.nn.functional.l1_loss(out["energy"].float(), batch.y)
        forces = torch.linalg.vector_norm(out["forces"].float() - batch.force, dim=-1).mean()
        return energy + self.config["force_coefficient"] * forces

    def _backward(self, loss):
        self.optimizer.zero_grad()
        loss.backward()
        if self.config.get("clip_grad_norm"):
            if self.scaler:
                self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=self.config["clip_grad_norm"])
        if self.scaler:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()

    def train(self):
        for epoch in range(self.config["max_epochs"]):
            self.model.train()
            for i, batch in enumerate(self.loader):
                batch = batch.to(self.device)
                with torch.autocast(self.device, dtype=torch.float16, enabled=self.scaler is not None):
                    out = self.model(batch)
                    loss = self._compute_loss(out, batch)
                loss = self.scaler.scale(loss) if self.scaler else loss
                self._backward(loss)
                scale = self.scaler.get_scale() if self.scaler else 1.0  # <- here
                self.metrics.append(loss.item() / scale)
                if i % self.config["print_every"] == 0:
                    logging.info("epoch %d step %d loss %.4f", epoch, i, self.metrics[-1])
