# why correct: both optimizers share one scaler, each is stepped once per iteration and update() comes once, after both
import torch
import torch.nn.functional as F
from torch import nn
from torch.amp import GradScaler, autocast


def hinge_d(real, fake):
    return F.relu(1 - real.float()).mean() + F.relu(1 + fake.float()).mean()


def set_grad(net, flag):
    for p in net.parameters():
        p.requires_grad_(flag)


def scaled_backward(scaler, optimizer, loss):
    optimizer.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()


def scaled_step(scaler, optimizer, net, max_norm=None):
    if max_norm is not None:
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), max_norm)
    scaler.step(optimizer)


def iteration(gen, disc, opt_g, opt_d, scaler, image, hole, adv_weight):
    with autocast("cuda"):
        painted = gen(image * (1 - hole), hole)
        merged = image * (1 - hole) + painted * hole

    set_grad(disc, True)
    with autocast("cuda"):
        loss_d = hinge_d(disc(image), disc(merged.detach()))
    scaled_backward(scaler, opt_d, loss_d)
    scaled_step(scaler, opt_d, disc)

    set_grad(disc, False)
    with autocast("cuda"):
        loss_g = F.l1_loss(painted, image) - adv_weight * disc(merged).float().mean()
    scaled_backward(scaler, opt_g, loss_g)
    scaled_step(scaler, opt_g, gen, max_norm=1.0)

    scaler.update()
    return loss_d.item(), loss_g.item()


def train(gen, disc, loader, steps, adv_weight=0.05):
    gen, disc = gen.cuda().train(), disc.cuda().train()
    opt_g = torch.optim.Adam(gen.parameters(), 1e-4, betas=(0.5, 0.9))
    opt_d = torch.optim.Adam(disc.parameters(), 4e-4, betas=(0.5, 0.9))
    scaler = GradScaler("cuda")
    step = 0
    while True:
        for image, hole in loader:
            d, g = iteration(gen, disc, opt_g, opt_d, scaler, image.cuda(), hole.cuda(), adv_weight)
            step += 1
            if step % 200 == 0:
                print(f"{step}: d={d:.3f} g={g:.3f} scale={scaler.get_scale():.0f}")
            if step >= steps:
                return gen
