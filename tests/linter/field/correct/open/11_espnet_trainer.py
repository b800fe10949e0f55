# style of: espnet/espnet:espnet2/train/trainer.py
# torch: 1.6+
import logging
from contextlib import nullcontext
from typing import Optional, Sequence

import torch
from torch.cuda.amp import GradScaler, autocast


class Trainer:
    """Stateless trainer: everything that changes is handed in."""

    @classmethod
    def build_scaler(cls, use_amp: bool) -> Optional[GradScaler]:
        return GradScaler() if use_amp else None

    @classmethod
    def resume(cls, path, model, optimizers, scaler: Optional[GradScaler]):
        states = torch.load(path, map_location="cpu")
        model.load_state_dict(states["model"])
        for optimizer, state in zip(optimizers, states["optimizers"]):
            optimizer.load_state_dict(state)
        if scaler is not None:
            if states["scaler"] is None:
                logging.warning("scaler state is not found")
            else:
                scaler.load_state_dict(states["scaler"])
        return states["epoch"] + 1

    @classmethod
    def save(cls, path, epoch, model, optimizers, scaler: Optional[GradScaler]):
        torch.save(
            {
                "epoch": epoch,
                "model": model.state_dict(),
                "optimizers": [o.state_dict() for o in optimizers],
                "scaler": scaler.state_dict() if scaler is not None else None,
            },
            path,
        )

    @classmethod
    def train_one_epoch(
        cls,
        model,
        iterator,
        optimizers: Sequence[torch.optim.Optimizer],
        scaler: Optional[GradScaler],
        accum_grad: int = 1,
        grad_clip: float = 5.0,
    ) -> bool:
        model.train()
        all_steps_are_invalid = True
        for iiter, batch in enumerate(iterator, 1):
            with autocast() if scaler is not None else nullcontext():
                loss, stats, weight = model(**batch)
            loss = loss / accum_grad
            if scaler is not None:
                scaler.scale(loss).backward()
            else:
                loss.backward()

            if iiter % accum_grad != 0:
                continue
            if scaler is not None:
                for optimizer in optimizers:
                    scaler.unscale_(optimizer)
            grad_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=grad_clip)

            if scaler is not None:
                # step() skips by itself on inf/nan; update() has to run in any case,
                # since unscale_ has been called
                for optimizer in optimizers:
                    scaler.step(optimizer)
                scaler.update()
            elif torch.isfinite(grad_norm):
                for optimizer in optimizers:
                    optimizer.step()
            if torch.isfinite(grad_norm):
                all_steps_are_invalid = False
            else:
                logging.warning("The grad norm is %s. Skipping the update.", grad_norm)
            for optimizer in optimizers:
                optimizer.zero_grad()
        for optimizer in optimizers:
            optimizer.zero_grad()
        return all_steps_are_invalid
