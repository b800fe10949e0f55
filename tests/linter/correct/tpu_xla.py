import torch_xla.core.xla_model as xm
from torch_xla.amp import GradScaler, autocast, syncfree


def train(model, loader, loss_fn):
    device = xm.xla_device()
    optimizer = syncfree.SGD(model.parameters(), lr=0.1)
    scaler = GradScaler()
    for data, target in loader:
        optimizer.zero_grad()
        with autocast(device):
            loss = loss_fn(model(data), target)
        scaler.scale(loss).backward()
        gradients = xm._fetch_gradients(optimizer)
        xm.all_reduce("sum", gradients, scale=1.0 / xm.xrt_world_size())
        scaler.step(optimizer)
        scaler.update()
        xm.mark_step()
