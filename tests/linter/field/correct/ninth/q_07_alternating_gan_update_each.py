# why correct: the generator's loss is scaled only after the discriminator's update(), so calling update() twice per iteration never mixes two scales
import torch
import torch.nn.functional as F
from torch.amp import GradScaler, autocast

HALF = dict(device_type="cuda", dtype=torch.float16)


def feature_match(real, fake):
    return sum(F.l1_loss(f.float(), r.detach().float()) for r, f in zip(real, fake))


def discriminator_turn(disc, wav, fake, opt, scaler):
    opt.zero_grad(set_to_none=True)
    with autocast(**HALF):
        real_out, _ = disc(wav)
        fake_out, _ = disc(fake.detach())
        loss = sum((1 - r.float()).pow(2).mean() + f.float().pow(2).mean() for r, f in zip(real_out, fake_out))
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(disc.parameters(), 1e3)
    scaler.step(opt)
    scaler.update()
    return loss.item()


def generator_turn(gen, disc, wav, fake, mel_fn, opt, scaler):
    opt.zero_grad(set_to_none=True)
    with autocast(**HALF):
        with torch.no_grad():
            _, real_feats = disc(wav)
    with autocast(**HALF):
        fake_out, fake_feats = disc(fake)
        adv = sum((1 - f.float()).pow(2).mean() for f in fake_out)
        fm = feature_match(real_feats, fake_feats)
    mel = F.l1_loss(mel_fn(fake.float()), mel_fn(wav.float()))
    loss = adv + 2 * fm + 45 * mel
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    torch.nn.utils.clip_grad_norm_(gen.parameters(), 1e3)
    scaler.step(opt)
    scaler.update()
    return loss.item(), mel.item()


def run(gen, disc, mel_fn, loader, steps, device="cuda"):
    gen.to(device).train()
    disc.to(device).train()
    opt_g = torch.optim.AdamW(gen.parameters(), lr=1e-4, betas=(0.8, 0.99))
    opt_d = torch.optim.AdamW(disc.parameters(), lr=1e-4, betas=(0.8, 0.99))
    scaler = GradScaler("cuda")
    step = 0
    while step < steps:
        for cond, wav in loader:
            cond, wav = cond.to(device), wav.to(device)
            with autocast(**HALF):
                fake = gen(cond)
            d = discriminator_turn(disc, wav, fake, opt_d, scaler)
            g, mel = generator_turn(gen, disc, wav, fake, mel_fn, opt_g, scaler)
            if step % 100 == 0:
                print(f"{step} d {d:.3f} g {g:.3f} mel {mel:.3f} scale {scaler.get_scale():.0f}")
            step += 1
            if step >= steps:
                break
    torch.save(gen.state_dict(), "gen.pt")
