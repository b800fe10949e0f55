# source: https://github.com/Haian-Jin/LVSM/pull/19
# mistake: when the norm is too large both step and update are left out after unscale_, so the next iteration's unscale_ raises RuntimeError.
# severity: error
# torch: any
import torch
from easydict import EasyDict as edict


def optimizer_step(cfg: edict, model, optimizer, scaler, step: int) -> bool:
    scaler.unscale_(optimizer)  # <- here
    total_norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.training.grad_clip_norm).item()

    if total_norm > 2 * cfg.training.grad_clip_norm:
        print(f"step {step}: grad norm {total_norm:.2f} is large")

    skip = total_norm > cfg.training.allowed_gradnorm_factor * cfg.training.grad_clip_norm
    if skip:
        print(f"step {step}: grad norm {total_norm:.2f}, no parameter update")
    else:
        scaler.step(optimizer)
        scaler.update()  # <- here
    optimizer.zero_grad(set_to_none=True)
    return not skip


def train(cfg, model, dataloader):
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.training.lr, betas=(0.9, 0.95), fused=True)
    scaler = torch.amp.GradScaler("cuda", enabled=cfg.training.use_amp and cfg.training.amp_dtype == "fp16")
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[cfg.training.amp_dtype]

    n_updates = 0
    for step, batch in enumerate(dataloader):
        batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}
        with torch.autocast("cuda", enabled=cfg.training.use_amp, dtype=dtype):
            result = model(batch)
            loss = result.loss_metrics.loss
        scaler.scale(loss).backward()
        n_updates += optimizer_step(cfg, model, optimizer, scaler, step)
        if step % 100 == 0:
            print(f"fwd {step} upd {n_updates} loss {loss.item():.4f}")
        if n_updates >= cfg.training.train_steps:
            break
