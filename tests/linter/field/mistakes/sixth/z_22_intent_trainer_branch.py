# source: alibaba/EasyNLP issue #64
# mistake: only the full-precision branch clears the gradients; with AMP they pile up over the whole run and training doesn't converge
# severity: error
import logging

import torch
from torch.utils.data import DataLoader

logger = logging.getLogger(__name__)


class Statistics:
    def __init__(self, every):
        self.every, self.sum, self.n = every, 0.0, 0

    def add(self, value, step):
        self.sum += value
        self.n += 1
        if step % self.every == 0:
            logger.info("step %d avg loss %.4f", step, self.sum / self.n)
            self.sum, self.n = 0.0, 0


class IntentTrainer:
    def __init__(self, model, dataset, evaluator, args):
        self.args = args
        self.device = torch.device(args.device)
        self._model = model.to(self.device)
        self._loader = DataLoader(dataset, args.batch_size, shuffle=True, collate_fn=dataset.collate)
        self._evaluator = evaluator
        self._optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=args.weight_decay)
        total = args.epochs * len(self._loader)
        self._lr_scheduler = torch.optim.lr_scheduler.OneCycleLR(self._optimizer, args.lr, total_steps=total + 1)
        self._amp = args.use_amp
        self._scaler = torch.cuda.amp.GradScaler() if self._amp else None
        self._stats = Statistics(args.logging_steps)
        self._global_step = 0

    def _loss(self, batch):
        batch = {k: v.to(self.device) for k, v in batch.items()}
        labels = batch.pop("label_ids")
        with torch.cuda.amp.autocast(enabled=self._amp):
            return torch.nn.functional.cross_entropy(self._model(**batch), labels)

    def _before_backward(self, loss):
        return self._scaler.scale(loss) if self._amp else loss

    def _optimize(self):
        params = self._model.parameters()
        if self._amp:
            self._scaler.unscale_(self._optimizer)
            torch.nn.utils.clip_grad_norm_(params, self.args.max_grad_norm)
            self._scaler.step(self._optimizer)
            self._scaler.update()  # <- here
        else:
            torch.nn.utils.clip_grad_norm_(params, self.args.max_grad_norm)
            self._optimizer.step()
            self._optimizer.zero_grad()  # <- here
        self._lr_scheduler.step()

    def train(self):
        self._model.train()
        for epoch in range(self.args.epochs):
            for batch in self._loader:
                loss = self._loss(batch)
                self._before_backward(loss).backward()  # <- here
                self._optimize()
                self._global_step += 1
                self._stats.add(loss.item(), self._global_step)
            self._evaluate(epoch)

    def _evaluate(self, epoch):
        self._model.eval()
        with torch.no_grad():
            score = self._evaluator(self._model, self.device)
        self._model.train()
        logger.info("epoch %d score %.3f", epoch, score)
