# source: microsoft/ptgnn PR #17 ("Fix reported training loss when using AMP")
# mistake: the loss variable is overwritten by the scaled loss before it is accumulated, so the reported loss, and the plateau scheduler fed with it, follow the loss scale instead of the loss
# severity: error
import logging
import time

import torch
from torch import nn
from torch.optim.lr_scheduler import ReduceLROnPlateau


class CodeSummarizer(nn.Module):
    def __init__(self, vocab, dim=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.enc = nn.GRU(dim, dim, batch_first=True)
        self.dec = nn.GRU(dim, dim, batch_first=True)
        self.out = nn.Linear(dim, vocab)
        self.crit = nn.CrossEntropyLoss(ignore_index=0)

    def forward(self, code, summary):
        _, state = self.enc(self.emb(code))
        h, _ = self.dec(self.emb(summary[:, :-1]), state)
        return self.crit(self.out(h).flatten(0, 1), summary[:, 1:].flatten())


class ModelTrainer:
    LOGGER = logging.getLogger(__name__)

    def __init__(self, model, *, max_epochs=100, enable_amp=True, clip=None, lr=1e-3, patience=3):
        self.model = model
        self.max_epochs = max_epochs
        self.enable_amp = enable_amp
        self.clip = clip
        self.optimizer = torch.optim.Adam(model.parameters(), lr=lr)
        self.scheduler = ReduceLROnPlateau(self.optimizer, mode="min", factor=0.5, patience=patience)
        self.scaler = torch.amp.GradScaler("cuda", enabled=enable_amp)
        self.hooks = []

    def register_epoch_hook(self, fn):
        self.hooks.append(fn)

    def _training_epoch(self, minibatches, device):
        self.model.train()
        sum_loss = torch.zeros((), device=device)
        count, start = 0, time.time()
        for code, summary in minibatches:
            code, summary = code.to(device), summary.to(device)
            self.optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.enable_amp):
                loss = self.model(code, summary)
            loss = self.scaler.scale(loss)  # <- here
            loss.backward()
            if self.clip is not None:
                self.scaler.unscale_(self.optimizer)
                nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            sum_loss += loss.detach()  # <- here
            count += 1
        self.LOGGER.info("%.1f batches/s", count / (time.time() - start))
        return (sum_loss / max(count, 1)).item()  # <- here

    @torch.no_grad()
    def _validation_epoch(self, minibatches, device):
        self.model.eval()
        vals = [self.model(c.to(device), s.to(device)) for c, s in minibatches]
        return torch.stack(vals).mean().item()

    def train(self, train_data, valid_data, device="cuda"):
        self.model.to(device)
        best = float("inf")
        for epoch in range(self.max_epochs):
            train_loss = self._training_epoch(train_data(), device)
            valid_loss = self._validation_epoch(valid_data(), device)
            self.scheduler.step(train_loss)  # <- here
            self.LOGGER.info("epoch %d train %.4f valid %.4f", epoch, train_loss, valid_loss)
            for hook in self.hooks:
                hook(self.model, epoch, {"train": train_loss, "valid": valid_loss})
            if valid_loss < best:
                best = valid_loss
                torch.save(self.model.state_dict(), "summarizer.best.pt")
        return best
