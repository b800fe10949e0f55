# source: k2-fsa/icefall PR #2081 (review thread on egs/grid/VSR/conformer_ctc2/train.py)
# mistake: the gradient norm is clipped while the gradients still carry the loss scale, so the clip threshold is effectively thousands of times smaller than asked and training crawls
# severity: error
import logging
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import DataLoader

log = logging.getLogger(__name__)


@dataclass
class Recipe:
    lr: float = 3e-4
    max_norm: float = 5.0
    warmup: int = 8000
    epochs: int = 40
    use_fp16: bool = True


class Tagger(nn.Module):
    def __init__(self, n_mels: int, n_tokens: int, width: int = 384):
        super().__init__()
        self.subsample = nn.Conv1d(n_mels, width, kernel_size=5, stride=4, padding=2)
        layer = nn.TransformerEncoderLayer(width, 6, 4 * width, batch_first=True, norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 8)
        self.out = nn.Linear(width, n_tokens)

    def forward(self, feats):
        h = self.subsample(feats.transpose(1, 2)).transpose(1, 2)
        return self.out(self.encoder(h))


def collate(items):
    feats = pad_sequence([f for f, _ in items], batch_first=True)
    lens = torch.tensor([len(f) for f, _ in items])
    tokens = torch.cat([t for _, t in items])
    tlens = torch.tensor([len(t) for _, t in items])
    return feats, lens, tokens, tlens


class CtcLearner:
    def __init__(self, model: nn.Module, recipe: Recipe, device: str = "cuda"):
        self.net = model.to(device)
        self.recipe = recipe
        self.device = device
        self.opt = torch.optim.AdamW(self.net.parameters(), lr=recipe.lr, weight_decay=1e-2)
        self.sched = torch.optim.lr_scheduler.LambdaLR(
            self.opt, lambda s: min((s + 1) / recipe.warmup, (recipe.warmup / (s + 1)) ** 0.5)
        )
        self.amp_scaler = torch.amp.GradScaler("cuda", enabled=recipe.use_fp16)
        self.criterion = nn.CTCLoss(zero_infinity=True)

    def _objective(self, batch):
        feats, lens, tokens, tlens = batch
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.recipe.use_fp16):
            logits = self.net(feats.to(self.device, non_blocking=True))
        logp = logits.float().log_softmax(-1).transpose(0, 1)
        return self.criterion(logp, tokens.to(self.device), (lens + 3) // 4, tlens)

    def _update(self, loss) -> float:
        self.opt.zero_grad(set_to_none=True)
        self.amp_scaler.scale(loss).backward()  # <- here
        norm = nn.utils.clip_grad_norm_(self.net.parameters(), self.recipe.max_norm)  # <- here
        self.amp_scaler.step(self.opt)
        self.amp_scaler.update()
        self.sched.step()
        return float(norm)

    def fit(self, loader: DataLoader):
        self.net.train()
        for epoch in range(self.recipe.epochs):
            for i, batch in enumerate(loader):
                loss = self._objective(batch)
                norm = self._update(loss)
                if i % 100 == 0:
                    log.info("ep %d it %d loss %.3f |g| %.2f", epoch, i, loss.item(), norm)
