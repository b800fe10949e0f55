# source: https://github.com/espnet/espnet/pull/3283
# mistake: when the gradient norm is not finite the step is left out but the gradients are not zeroed, so the NaNs stay in .grad and every later accumulation is NaN too.
# severity: error
import dataclasses
import logging
import time
from typing import Iterable, Optional

import torch
from torch.cuda.amp import GradScaler, autocast


@dataclasses.dataclass
class Options:
    accum_grad: int = 4
    grad_clip: float = 5.0
    grad_noise: bool = False
    use_amp: bool = True
    log_interval: int = 100
    ngpu: int = 1


class Reporter:
    def __init__(self):
        self.rows = []

    def register(self, **stats):
        self.rows.append(stats)

    def mean(self, key, last=100):
        vals = [r[key] for r in self.rows[-last:] if key in r]
        return sum(vals) / max(len(vals), 1)


def add_gradient_noise(model, scale=0.01):
    for p in model.parameters():
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p.grad), alpha=scale)


class SpeechTrainer:
    @classmethod
    def train_one_epoch(cls, model, iterator: Iterable, optimizer, scheduler, scaler: Optional[GradScaler],
                        reporter: Reporter, opt: Options) -> bool:
        model.train()
        all_invalid = True
        optimizer.zero_grad()
        for iiter, (utt_id, batch) in enumerate(iterator, 1):
            start = time.perf_counter()
            batch = {k: v.to("cuda" if opt.ngpu > 0 else "cpu") for k, v in batch.items()}
            with autocast(enabled=scaler is not None):
                loss, stats, weight = model(**batch)
            loss = loss / opt.accum_grad
            if scaler is not None:
                scaler.scale(loss).backward()
            else:
                loss.backward()
            reporter.register(loss=loss.item() * opt.accum_grad, **stats)

            if iiter % opt.accum_grad == 0:
                if scaler is not None:
                    scaler.unscale_(optimizer)
                if opt.grad_noise:
                    add_gradient_noise(model)
                grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=opt.grad_clip)

                if not torch.isfinite(grad_norm):  # <- here
                    logging.warning("The grad norm is %s. Skipping updating the model.", grad_norm)
                    if scaler is not None:
                        scaler.step(optimizer)
                        scaler.update()  # <- here
                else:
                    all_invalid = False
                    if scaler is not None:
                        scaler.step(optimizer)
                        scaler.update()
                    else:
                        optimizer.step()
                    if scheduler is not None:
                        scheduler.step()
                    optimizer.zero_grad()  # <- here
                reporter.register(norm=float(grad_norm), seconds=time.perf_counter() - start)

            if iiter % opt.log_interval == 0:
                logging.info("%d: loss %.3f norm %.3f", iiter, reporter.mean("loss"), reporter.mean("norm"))
        return all_invalid


def run(model, make_iterator, epochs, opt=Options()):
    model = model.to("cuda" if opt.ngpu > 0 else "cpu")
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min((s + 1) ** -0.5, (s + 1) * 4000 ** -1.5))
    scaler = GradScaler() if opt.use_amp else None
    reporter = Reporter()
    for epoch in range(epochs):
        bad = SpeechTrainer.train_one_epoch(model, make_iterator(epoch), optimizer, scheduler, scaler, reporter, opt)
        if bad:
            logging.warning("no valid update in epoch %d", epoch)
            break
    return model
