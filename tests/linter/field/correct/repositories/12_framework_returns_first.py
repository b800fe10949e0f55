# the branch of the framework returns before the scaler of the other is used
import torch
from accelerate import Accelerator

def run(cfg, model, loader, params):
    acc = Accelerator(mixed_precision=cfg.precision, gradient_accumulation_steps=cfg.accum) if cfg.accelerate else None
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    if acc is not None:
        model, optimizer, loader = acc.prepare(model, optimizer, loader)
        for batch in loader:
            with acc.accumulate(model):
                loss = model(batch).mean()
                acc.backward(loss)
                if acc.sync_gradients:
                    acc.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        return
    scaler = torch.amp.GradScaler("cuda")
    for i, batch in enumerate(loader):
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch).mean() / cfg.accum
        scaler.scale(loss).backward()
        if (i + 1) % cfg.accum == 0 or i + 1 == len(loader):
            scaler.unscale_(optimizer)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
