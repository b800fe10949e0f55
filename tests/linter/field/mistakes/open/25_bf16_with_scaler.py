# source: https://github.com/ecmwf/WeatherGenerator/issues/874
# mistake: a GradScaler is used although autocast is bfloat16, which needs no loss scaling; it costs time and can skip steps.
# severity: warning
# torch: any
import logging

import torch

log = logging.getLogger(__name__)


class Trainer:
    def __init__(self, cf, model, loss_calculator, data_loader):
        self.cf = cf
        self.model = model.to("cuda")
        self.loss_calculator = loss_calculator
        self.data_loader = data_loader
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=cf.lr_start, weight_decay=cf.weight_decay, betas=(0.9, 0.975), fused=True
        )
        self.grad_scaler = torch.amp.GradScaler("cuda")  # <- here

    def train(self, epoch: int):
        self.model.train()
        for bidx, batch in enumerate(self.data_loader):
            forecast_steps = batch[-1]
            batch = self.batch_to_device(batch)
            with torch.autocast(device_type="cuda", dtype=torch.bfloat16, enabled=self.cf.with_mixed_precision):
                preds = self.model(batch, forecast_steps)
                loss = self.loss_calculator(preds, batch)

            self.optimizer.zero_grad()
            self.grad_scaler.scale(loss).backward()
            self.grad_scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=self.cf.grad_clip)
            self.grad_scaler.step(self.optimizer)
            self.grad_scaler.update()

            if bidx % self.cf.log_every == 0:
                log.info("epoch %d batch %d loss %.5f", epoch, bidx, loss.item())

    @staticmethod
    def batch_to_device(batch):
        return [b.to("cuda", non_blocking=True) if torch.is_tensor(b) else b for b in batch]

    def run(self):
        for epoch in range(self.cf.num_epochs):
            self.train(epoch)
