import torch
import torch.nn.functional as F
from torch.func import functional_call


def maml(model, tasks, optimizer, inner_lr):
    scaler = torch.amp.GradScaler("cuda")
    params = dict(model.named_parameters())
    for batch in tasks:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            inner = F.mse_loss(functional_call(model, params, (batch.x,)), batch.y)
        grads = torch.autograd.grad(scaler.scale(inner), list(params.values()), create_graph=True)
        inverse = 1.0 / scaler.get_scale()
        fast = {n: p - inner_lr * (g * inverse) for (n, p), g in zip(params.items(), grads)}
        with torch.autocast("cuda", dtype=torch.float16):
            outer = F.mse_loss(functional_call(model, fast, (batch.qx,)), batch.qy)
        scaler.scale(outer).backward()
        scaler.step(optimizer)
        scaler.update()
