# source: Haian-Jin/LVSM PR #19
# mistake: when a step is skipped for a too large norm the scaler is not updated after unscale_, so the next unscale_ raises
# severity: error
import yaml
import torch
import torch.nn.functional as F
from easydict import EasyDict as edict

from views.model import ViewTransformer
from views.scenes import scene_loader

cfg = edict(yaml.safe_load(open("configs/views.yaml")))
torch.manual_seed(cfg.seed)
torch.backends.cuda.matmul.allow_tf32 = True

model = ViewTransformer(**cfg.model).cuda()
decay = [p for p in model.parameters() if p.ndim > 1]
plain = [p for p in model.parameters() if p.ndim <= 1]
optimizer = torch.optim.AdamW(
    [{"params": decay, "weight_decay": 0.05}, {"params": plain, "weight_decay": 0.0}],
    lr=cfg.lr,
    betas=(0.9, 0.95),
)
scaler = torch.amp.GradScaler("cuda")
loader = scene_loader(cfg.data)


def lr_at(step):
    if step < cfg.warmup:
        return cfg.lr * (step + 1) / cfg.warmup
    return cfg.lr


def psnr(a, b):
    return -10 * torch.log10(F.mse_loss(a.float(), b.float()))


step = skipped = 0
for batch in loader:
    if step >= cfg.max_steps:
        break
    for g in optimizer.param_groups:
        g["lr"] = lr_at(step)
    batch = {k: v.cuda(non_blocking=True) for k, v in batch.items()}

    optimizer.zero_grad(set_to_none=True)
    with torch.autocast("cuda", dtype=torch.float16):
        render = model(batch["source"], batch["source_rays"], batch["target_rays"])
        loss = F.mse_loss(render, batch["target"])
    scaler.scale(loss).backward()
    scaler.unscale_(optimizer)  # <- here
    norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)

    if norm > cfg.skip_above and step > cfg.warmup:  # <- here
        skipped += 1
        print(f"step {step}: norm {norm:.2f}, no update ({skipped} so far)")
        step += 1
        continue  # <- here

    scaler.step(optimizer)
    scaler.update()  # <- here
    step += 1

    if step % 100 == 0:
        print(f"{step} loss {loss.item():.5f} psnr {psnr(render, batch['target']).item():.2f}")

torch.save(model.state_dict(), cfg.out)
