# why correct: the wrapper's __call__ unscales before it clips, and does both only on the last micro batch of a group; the trainer never touches the raw scaler
from contextlib import nullcontext
from functools import partial

import torch
from torch import nn


class LossScalerWithNorm:
    """scale + backward, and on request clip + step + update. `state_dict` for checkpoints."""

    key = "grad_scaler"

    def __init__(self, enabled):
        self._inner = torch.amp.GradScaler("cuda", enabled=enabled)

    def __call__(self, loss, optimizer, max_norm=None, params=(), finish=True):
        self._inner.scale(loss).backward()
        if not finish:
            return None
        params = list(params)
        self._inner.unscale_(optimizer)
        if max_norm is not None:
            norm = nn.utils.clip_grad_norm_(params, max_norm)
        else:
            norm = torch.linalg.vector_norm(torch.stack([p.grad.norm() for p in params if p.grad is not None]))
        self._inner.step(optimizer)
        self._inner.update()
        return norm

    def state_dict(self):
        return self._inner.state_dict()

    def load_state_dict(self, blob):
        self._inner.load_state_dict(blob)


def dice_ce(logits, target, eps=1.0):
    logits = logits.float()
    probs = logits.softmax(1)
    onehot = nn.functional.one_hot(target, logits.shape[1]).permute(0, 4, 1, 2, 3).to(probs)
    inter = (probs * onehot).sum((2, 3, 4))
    union = probs.sum((2, 3, 4)) + onehot.sum((2, 3, 4))
    return nn.functional.cross_entropy(logits, target) + 1 - ((2 * inter + eps) / (union + eps)).mean()


def train_volumes(model, loader, optimizer, scaler: LossScalerWithNorm, half, accumulate=2, clip=12.0):
    model.train()
    ctx = partial(torch.autocast, "cuda", dtype=torch.float16) if half else nullcontext
    optimizer.zero_grad(set_to_none=True)
    last = len(loader) - 1
    norms = []
    for i, (volume, label) in enumerate(loader):
        group_start = i - i % accumulate
        group = min(accumulate, len(loader) - group_start)
        finish = (i + 1) % accumulate == 0 or i == last
        with ctx():
            loss = dice_ce(model(volume.cuda(non_blocking=True)), label.cuda(non_blocking=True))
        norm = scaler(loss / group, optimizer, clip, model.parameters(), finish)
        if finish:
            optimizer.zero_grad(set_to_none=True)
            norms.append(float(norm))
    return sum(norms) / max(len(norms), 1)


def checkpoint(path, model, optimizer, scaler, epoch):
    torch.save({"net": model.state_dict(), "opt": optimizer.state_dict(), scaler.key: scaler.state_dict(),
                "epoch": epoch}, path)
