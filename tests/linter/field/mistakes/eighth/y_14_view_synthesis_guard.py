# source: https://github.com/Haian-Jin/LVSM/pull/19
# mistake: when the norm guard skips the step, scaler.update() is skipped too although unscale_() has run, so the next unscale_() raises.
# severity: error
import torch
import torch.nn.functional as F
from omegaconf import OmegaConf
from torch.utils.data import DataLoader

from novel.data import ViewPairs
from novel.model import ViewTransformer


def schedule(step, warm, total):
    if step < warm:
        return step / warm
    return 0.5 * (1 + torch.cos(torch.tensor(3.14159 * (step - warm) / (total - warm)))).item()


def endless(loader):
    while True:
        yield from loader


def main(cfg):
    torch.manual_seed(cfg.seed)
    dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}[cfg.precision]
    model = ViewTransformer(**cfg.model).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda", enabled=dtype is torch.float16)
    loader = DataLoader(ViewPairs(cfg.scenes), cfg.batch, shuffle=True, num_workers=8, drop_last=True)
    stream = endless(loader)

    applied = skipped = 0
    for forward_step in range(cfg.total):
        for group in optimizer.param_groups:
            group["lr"] = cfg.lr * schedule(applied, cfg.warmup, cfg.total)
        views, poses, target = (t.cuda(non_blocking=True) for t in next(stream))
        with torch.autocast("cuda", dtype=dtype):
            pred = model(views, poses)
        mse = F.mse_loss(pred.float(), target)
        loss = mse + cfg.tv * (pred[..., 1:].float() - pred[..., :-1].float()).abs().mean()

        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)  # <- here
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), cfg.clip)
        if not torch.isfinite(norm) or norm > cfg.forbid:  # <- here
            skipped += 1
            print(f"step {forward_step}: norm {norm.item():.2f}, update left out ({skipped} so far)")
            optimizer.zero_grad(set_to_none=True)
            continue  # <- here
        scaler.step(optimizer)
        scaler.update()  # <- here
        optimizer.zero_grad(set_to_none=True)
        applied += 1

        if forward_step % 20 == 0:
            print(f"step {forward_step} loss {loss.item():.5f} psnr {-10 * torch.log10(mse.detach()).item():.2f} "
                  f"norm {norm.item():.3f}")
        if forward_step % cfg.save_every == 0:
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(),
                        "scaler": scaler.state_dict(), "step": forward_step}, f"{cfg.out}/{forward_step:07d}.pt")


if __name__ == "__main__":
    base = OmegaConf.create(dict(
        seed=11, precision="fp16", lr=4e-4, warmup=2500, total=100000, batch=8, clip=1.0, forbid=5.0, tv=0.01,
        save_every=5000, out="ckpt", scenes="/data/re10k", model=dict(dim=768, depth=12, heads=12)))
    main(OmegaConf.merge(base, OmegaConf.from_cli()))
