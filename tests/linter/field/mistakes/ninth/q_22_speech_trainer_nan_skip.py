# source: https://github.com/espnet/espnet/pull/3283
# mistake: when the norm is not finite the loop goes on without zeroing the gradients, so the NaNs stay in .grad and every later window is skipped as well
# severity: error
import dataclasses
import logging
from typing import Callable, Iterable

import torch


@dataclasses.dataclass
class TrainerOptions:
    accum_grad: int = 4
    grad_clip: float = 5.0
    use_amp: bool = True
    log_interval: int = 100


class Reporter:
    def __init__(self):
        self.rows = []

    def add(self, **kw):
        self.rows.append(kw)

    def mean(self, key):
        vals = [r[key] for r in self.rows if key in r]
        return sum(vals) / max(1, len(vals))


def train_one_epoch(
    model: torch.nn.Module,
    batches: Iterable[dict],
    optimizer: torch.optim.Optimizer,
    scheduler,
    scaler: torch.amp.GradScaler,
    move: Callable[[dict], dict],
    options: TrainerOptions,
) -> Reporter:
    model.train()
    reporter = Reporter()
    optimizer.zero_grad(set_to_none=True)
    for iiter, batch in enumerate(batches, 1):
        batch = move(batch)
        with torch.autocast("cuda", dtype=torch.float16, enabled=options.use_amp):
            loss, stats = model(**batch)
        scaler.scale(loss / options.accum_grad).backward()
        reporter.add(loss=loss.item(), **stats)

        if iiter % options.accum_grad != 0:
            continue

        scaler.unscale_(optimizer)
        grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
        if not torch.isfinite(grad_norm):  # <- here
            logging.warning("The grad norm is %s. Skipping updating the model.", grad_norm.item())
            scaler.update()  # <- here
            continue  # <- here

        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad(set_to_none=True)  # <- here
        if iiter % options.log_interval == 0:
            logging.info("iter %d loss %.3f norm %.2f", iiter, reporter.mean("loss"), grad_norm.item())
    return reporter


def run(model, make_batches, move, max_epoch=60, options=TrainerOptions()):
    model = model.cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-3, betas=(0.9, 0.98), eps=1e-9)
    scheduler = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda s: min((s + 1) ** -0.5 * 25000 ** 0.5, (s + 1) / 25000))
    scaler = torch.amp.GradScaler("cuda", enabled=options.use_amp)
    for epoch in range(1, max_epoch + 1):
        rep = train_one_epoch(model, make_batches(epoch), optimizer, scheduler, scaler, move, options)
        logging.info("epoch %d: %.4f", epoch, rep.mean("loss"))
    torch.save(model.state_dict(), "final.pth")
