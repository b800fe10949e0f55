# source: https://github.com/yandex-research/tabm/issues/20
# mistake: unscaling and clipping are placed before backward, when no gradient of this step exists: unscale_ finds nothing to check or raises, and nothing is clipped.
# severity: error
# torch: any (2.13: AssertionError, the scale is not yet initialised)
# %% tabular ensemble, one notebook cell per section
import math

import torch
import torch.nn as nn
import torch.nn.functional as F

device = torch.device("cuda")
amp_dtype = torch.float16
grad_clip = 1.0

# %%
model = nn.Sequential(nn.Linear(24, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1)).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=3e-4)
grad_scaler = torch.amp.GradScaler("cuda")


def loss_fn(pred, target):
    return F.mse_loss(pred.squeeze(-1).float(), target)


# %%
def train(x_num, y, n_epochs=50, batch_size=256):
    n = len(y)
    for epoch in range(n_epochs):
        model.train()
        for idx in torch.randperm(n, device=device).split(batch_size):
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=amp_dtype):
                pred = model(x_num[idx])
            loss = loss_fn(pred, y[idx])

            grad_scaler.unscale_(optimizer)  # <- here
            nn.utils.clip_grad_norm_(model.parameters(), grad_clip)  # <- here
            grad_scaler.scale(loss).backward()

            grad_scaler.step(optimizer)
            grad_scaler.update()
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"loss is {loss.item()} in epoch {epoch}")


# %%
X = torch.randn(10_000, 24, device=device)
train(X, X[:, 0] * X[:, 1])
