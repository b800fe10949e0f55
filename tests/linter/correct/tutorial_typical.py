import torch
from torch import autocast
from torch.amp import GradScaler
from torch.optim import SGD

model = torch.nn.Linear(4, 4).cuda()
optimizer = SGD(model.parameters(), lr=0.1)
scaler = GradScaler("cuda")


def run(epochs, data, loss_fn):
    for epoch in epochs:
        for input, target in data:
            optimizer.zero_grad()
            with autocast(device_type="cuda", dtype=torch.float16):
                output = model(input)
                loss = loss_fn(output, target)
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=1.0)
            scaler.step(optimizer)
            scaler.update()
