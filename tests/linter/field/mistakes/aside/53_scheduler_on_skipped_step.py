# source: https://github.com/pytorch/pytorch/issues/44511
# mistake: the per-iteration schedule advances also when scaler.step() skipped the optimizer because of infinite gradients.
# severity: warning
# torch: any
import argparse

import torch
from torch.nn.utils import clip_grad_norm_
from torch.utils.data import DataLoader
from transformers import AutoModelForSequenceClassification, get_linear_schedule_with_warmup

from tweets import TweetSet


class Runner:
    def __init__(self, model, optimizer, lr_scheduler, device):
        self.model = model
        self.optimizer = optimizer
        self.lr_scheduler = lr_scheduler
        self.device = device
        self.scaler = torch.amp.GradScaler("cuda")

    def fit_epoch(self, loader):
        self.model.train()
        total = 0.0
        for batch in loader:
            batch = {k: v.to(self.device) for k, v in batch.items()}
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                loss = self.model(**batch).loss
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.lr_scheduler.step()  # <- here
            self.scaler.update()
            total += loss.item()
        return total / len(loader)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=3e-5)
    opts = parser.parse_args()

    device = torch.device("cuda")
    net = AutoModelForSequenceClassification.from_pretrained("roberta-base", num_labels=3).to(device)
    dl = DataLoader(TweetSet("train.csv"), batch_size=32, shuffle=True)
    adamw = torch.optim.AdamW(net.parameters(), lr=opts.lr)
    warmup = get_linear_schedule_with_warmup(adamw, 100, opts.epochs * len(dl))
    runner = Runner(net, adamw, warmup, device)
    for ep in range(opts.epochs):
        print(ep, runner.fit_epoch(dl))
