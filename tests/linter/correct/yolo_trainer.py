import warnings

import torch
from torch import nn


class BaseTrainer:
    def __init__(self, model, loader, args):
        self.model = model
        self.train_loader = loader
        self.args = args
        self.amp = True
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.amp)
        self.optimizer = torch.optim.SGD(model.parameters(), lr=args.lr0, momentum=0.9, nesterov=True)
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(self.optimizer, lr_lambda=lambda x: 1.0)
        self.accumulate = max(round(args.nbs / args.batch), 1)

    def train(self):
        last_opt_step = -1
        for epoch in range(self.args.epochs):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                self.scheduler.step()
            self.model.train()
            self.tloss = None
            for i, batch in enumerate(self.train_loader):
                ni = i + len(self.train_loader) * epoch
                with torch.autocast("cuda", enabled=self.amp):
                    batch = self.preprocess_batch(batch)
                    loss, self.loss_items = self.model(batch)
                    self.loss = loss.sum()
                    self.tloss = (
                        (self.tloss * i + self.loss_items) / (i + 1)
                        if self.tloss is not None
                        else self.loss_items
                    )
                self.scaler.scale(self.loss).backward()
                if ni - last_opt_step >= self.accumulate:
                    self.optimizer_step()
                    last_opt_step = ni
            self.save_model(epoch)

    def preprocess_batch(self, batch):
        return batch

    def optimizer_step(self):
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm=10.0)
        self.scaler.step(self.optimizer)
        self.scaler.update()
        self.optimizer.zero_grad()

    def save_model(self, epoch):
        torch.save(
            {
                "epoch": epoch,
                "model": self.model.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "scaler": self.scaler.state_dict(),
            },
            "last.pt",
        )

    def resume(self, ckpt):
        self.optimizer.load_state_dict(ckpt["optimizer"])
        self.scaler.load_state_dict(ckpt["scaler"])


class Wrapper(nn.Module):
    def forward(self, batch):
        return batch
