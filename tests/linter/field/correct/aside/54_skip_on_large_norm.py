# style of: https://github.com/Haian-Jin/LVSM/pull/19
# torch: 1.12+
import logging

import torch


class UpdateGuard:
    """Decides, from the true gradient norm, whether a step is worth taking."""

    def __init__(self, allowed_factor=5.0, clip=1.0, warmup=1000):
        self.allowed = allowed_factor * clip
        self.clip = clip
        self.warmup = warmup

    def rejects(self, step, norm):
        if not torch.isfinite(norm):
            return False  # the scaler skips these itself
        return step > self.warmup and norm.item() > self.allowed


def train(model, loader, optimizer, scheduler, config, device="cuda"):
    use_fp16 = config["amp_dtype"] == "fp16"
    amp_dtype = torch.float16 if use_fp16 else torch.bfloat16
    scaler = torch.cuda.amp.GradScaler(enabled=config["use_amp"] and use_fp16)
    guard = UpdateGuard(config["allowed_gradnorm_factor"], config["grad_clip_norm"])
    accum = config["grad_accum_steps"]
    fwdbwd_step, param_step = 0, 0
    optimizer.zero_grad(set_to_none=True)

    while param_step < config["train_steps"]:
        for batch in loader:
            fwdbwd_step += 1
            batch = {k: v.to(device) for k, v in batch.items()}
            with torch.autocast(enabled=config["use_amp"], device_type="cuda", dtype=amp_dtype):
                loss = model(batch)["loss"]
            scaler.scale(loss / accum).backward()
            if fwdbwd_step % accum:
                continue

            scaler.unscale_(optimizer)
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm=guard.clip)
            finite = bool(torch.isfinite(norm))
            skip = guard.rejects(param_step, norm) or (not scaler.is_enabled() and not finite)
            if skip:
                logging.warning("step %d: grad norm %.2f is too large, step skipped", param_step, norm.item())
            else:
                scaler.step(optimizer)
            # in both cases: unscale_ has recorded its check, and the state must be cleared
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            if not skip and finite:
                scheduler.step()
            param_step += 1
            if param_step >= config["train_steps"]:
                break
    return param_step
