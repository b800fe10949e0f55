"""
# source: https://github.com/espnet/espnet/pull/2362
# mistake: on a non-finite gradient norm both step() and update() are left out after unscale_, so the next unscale_ raises RuntimeError (and the scale is never lowered).
# severity: error
# torch: any
"""
import dataclasses
import logging
import math

import torch
from torch.cuda.amp import GradScaler, autocast


@dataclasses.dataclass
class TrainerOptions:
    accum_grad: int = 2
    grad_clip: float = 5.0
    log_interval: int = 50
    train_dtype: str = "float16"


class ASRTask:
    @classmethod
    def main(cls, model, optimizer, scheduler, iterators, options: TrainerOptions):
        scaler = GradScaler() if options.train_dtype == "float16" else None
        for iepoch, iterator in enumerate(iterators, 1):
            if cls.train_one_epoch(model, iterator, optimizer, scheduler, scaler, options):
                logging.warning("The gradients at all steps are invalid in epoch %d", iepoch)
                break

    @classmethod
    def train_one_epoch(cls, model, iterator, optimizer, scheduler, scaler, options) -> bool:
        all_invalid = True
        model.train()
        for iiter, batch in enumerate(iterator, 1):
            with autocast(enabled=scaler is not None):
                loss, stats = model(**batch)
            loss = loss / options.accum_grad
            if scaler is not None:
                scaler.scale(loss).backward()
            else:
                loss.backward()
            if iiter % options.accum_grad:
                continue
            if cls.update_parameters(model, optimizer, scheduler, scaler, options):
                all_invalid = False
            optimizer.zero_grad()
            if iiter % options.log_interval == 0:
                logging.info("iter %d: %s", iiter, stats)
        return all_invalid

    @staticmethod
    def update_parameters(model, optimizer, scheduler, scaler, options) -> bool:
        if scaler is not None:
            scaler.unscale_(optimizer)  # <- here
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), options.grad_clip)
        if not math.isfinite(norm):
            logging.warning("The grad norm is %s. Skipping updating the model.", norm)
            return False
        if scaler is not None:
            scaler.step(optimizer)
            scaler.update()  # <- here
        else:
            optimizer.step()
        scheduler.step()
        return True
