"""
# source: https://github.com/Topdu/OpenOCR/pull/217
# mistake: only the AMP path clears the gradients; without AMP each batch adds to the gradients of all batches before it.
# severity: error
# torch: any
"""
import os

import torch
from tqdm import tqdm


class Trainer:
    def __init__(self, cfg, model, criterion, loaders, metric):
        self.cfg = cfg["Global"]
        self.device = torch.device("cuda")
        self.model = model.to(self.device)
        self.criterion = criterion
        self.train_loader, self.valid_loader = loaders
        self.metric = metric
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["Optimizer"]["lr"])
        self.lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(
            self.optimizer, cfg["Optimizer"]["lr"], total_steps=self.cfg["epoch_num"] * len(self.train_loader)
        )
        self.scaler = torch.cuda.amp.GradScaler() if self.cfg.get("use_amp", False) else None
        self.grad_clip_val = self.cfg.get("grad_clip_val", 0)

    def _amp_step(self, images, labels):
        with torch.cuda.amp.autocast():
            preds = self.model(images, data=labels)
            loss = self.criterion(preds, labels)
        self.scaler.scale(loss["loss"]).backward()
        if self.grad_clip_val > 0:
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip_val)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad(set_to_none=True)
        return loss

    def _fp32_step(self, images, labels):
        preds = self.model(images, data=labels)
        loss = self.criterion(preds, labels)
        loss["loss"].backward()  # <- here
        if self.grad_clip_val > 0:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.grad_clip_val)
        self.optimizer.step()
        return loss

    def train(self):
        step_fn = self._amp_step if self.scaler else self._fp32_step
        for epoch in range(1, self.cfg["epoch_num"] + 1):
            self.model.train()
            bar = tqdm(self.train_loader, desc=f"train {epoch}")
            for images, labels in bar:
                images = images.to(self.device)
                labels = [t.to(self.device) for t in labels]
                loss = step_fn(images, labels)
                self.lr_scheduler.step()
                bar.set_postfix({k: f"{v.item():.4f}" for k, v in loss.items()})
            torch.save(self.model.state_dict(), os.path.join(self.cfg["output_dir"], f"epoch_{epoch}.pth"))
