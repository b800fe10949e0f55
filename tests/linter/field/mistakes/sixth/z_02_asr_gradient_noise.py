# source: rwth-i6/returnn PR #1595
# mistake: Gaussian noise of a fixed deviation is added to gradients that are still multiplied by the loss scale, so after unscaling it is 1/scale of what was asked for
# severity: error
import math

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast

CONFIG = {
    "n_mels": 80,
    "vocab": 512,
    "hidden": 640,
    "gradient_noise": 0.01,
    "noise_decay": 0.55,
    "lr": 4e-4,
    "warmup": 2000,
}


class CtcEncoder(nn.Module):
    def __init__(self, cfg):
        super().__init__()
        self.front = nn.Conv1d(cfg["n_mels"], cfg["hidden"], 5, stride=2, padding=2)
        self.rnn = nn.LSTM(cfg["hidden"], cfg["hidden"] // 2, 4, bidirectional=True, batch_first=True)
        self.out = nn.Linear(cfg["hidden"], cfg["vocab"])

    def forward(self, feats):
        h = torch.relu(self.front(feats.transpose(1, 2))).transpose(1, 2)
        h, _ = self.rnn(h)
        return self.out(h)


def make_updater(model, optimizer, scaler, cfg):
    """Returns update(), which finishes one optimisation step."""
    state = {"n": 0}

    def perturb():
        std = cfg["gradient_noise"] / math.pow(1 + state["n"], cfg["noise_decay"] / 2)
        for p in model.parameters():
            if p.grad is None:
                continue
            p.grad.add_(torch.randn_like(p.grad), alpha=std)  # <- here

    def update():
        perturb()  # <- here
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
        state["n"] += 1

    return update


def ctc_objective(logits, frames, targets, target_lens):
    logp = logits.float().log_softmax(-1).transpose(0, 1)
    return nn.functional.ctc_loss(logp, targets, (frames + 1) // 2, target_lens, zero_infinity=True)


def fit(model, batches, cfg=CONFIG, epochs=30, device="cuda"):
    model.to(device).train()
    optimizer = torch.optim.RAdam(model.parameters(), lr=cfg["lr"], betas=(0.9, 0.98))
    warm = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: min(1.0, (s + 1) / cfg["warmup"]))
    scaler = GradScaler()
    update = make_updater(model, optimizer, scaler, cfg)
    for epoch in range(epochs):
        running = 0.0
        for i, (feats, frames, targets, lens) in enumerate(batches, 1):
            feats, targets = feats.to(device), targets.to(device)
            with autocast():
                logits = model(feats)
                loss = ctc_objective(logits, frames, targets, lens)
            scaler.scale(loss).backward()  # <- here
            update()
            warm.step()
            running += loss.detach().item()
        print(f"[{epoch:03d}] ctc {running / i:.3f}")
    return model
