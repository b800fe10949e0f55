# why correct: BCELoss needs probabilities and is evaluated in float32 with autocast disabled, the rest runs under autocast
import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast


class NoisyOrDetector(nn.Module):
    """Probability that at least one of the instances of a bag is positive."""

    def __init__(self, encoder, dim):
        super().__init__()
        self.encoder = encoder
        self.logit = nn.Linear(dim, 1)

    def forward(self, bag):
        b, n = bag.shape[:2]
        feats = self.encoder(bag.flatten(0, 1))
        return self.logit(feats).view(b, n)


class BagLoss(nn.Module):
    def __init__(self):
        super().__init__()
        self.bce = nn.BCELoss()

    def forward(self, logits, label):
        with autocast(enabled=False):
            log_none = nn.functional.logsigmoid(-logits.float()).sum(dim=1)
            prob = (1.0 - log_none.exp()).clamp(1e-6, 1 - 1e-6)
            return self.bce(prob, label.float())


class BagTrainer:
    def __init__(self, model, lr=2e-4):
        self.model = model.cuda()
        self.loss = BagLoss()
        self.opt = torch.optim.AdamW(model.parameters(), lr=lr)
        self.scaler = GradScaler()

    def _train_step(self, bag, label):
        self.opt.zero_grad(set_to_none=True)
        with autocast():
            logits = self.model(bag)
            loss = self.loss(logits, label)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()
        return loss.item()

    @torch.no_grad()
    def evaluate(self, loader):
        self.model.eval()
        hits = n = 0
        for bag, label in loader:
            with autocast():
                logits = self.model(bag.cuda())
            prob = 1 - nn.functional.logsigmoid(-logits.float()).sum(1).exp()
            hits += ((prob > 0.5) == label.cuda().bool()).sum().item()
            n += label.numel()
        return hits / n

    def fit(self, train, val, epochs):
        for epoch in range(epochs):
            self.model.train()
            for bag, label in train:
                loss = self._train_step(bag.cuda(), label.cuda())
            print(epoch, loss, self.evaluate(val))
