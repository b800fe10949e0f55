# source: https://github.com/Lornatang/ESRGAN-PyTorch/issues/39
# mistake: after the discriminator's backward the scaler steps the generator's optimizer, so the discriminator is never trained and the generator steps twice (or the scaler raises).
# severity: error
# torch: any
import torch
from torch import nn, optim
from torch.amp import GradScaler, autocast

import model as models
from dataset import CUDAPrefetcher, build_loader


def train(d_model, g_model, prefetcher, pixel_criterion, adv_criterion, d_optimizer, g_optimizer, scaler, weights):
    d_model.train()
    g_model.train()
    prefetcher.reset()
    batch = prefetcher.next()
    while batch is not None:
        gt = batch["gt"].cuda(non_blocking=True)
        lr = batch["lr"].cuda(non_blocking=True)
        real = torch.full((gt.size(0), 1), 1.0, device=gt.device)
        fake = torch.full((gt.size(0), 1), 0.0, device=gt.device)

        # generator turn
        for p in d_model.parameters():
            p.requires_grad_(False)
        g_optimizer.zero_grad(set_to_none=True)
        with autocast("cuda", dtype=torch.float16):
            sr = g_model(lr)
            g_loss = weights["pixel"] * pixel_criterion(sr, gt) + weights["adv"] * adv_criterion(d_model(sr), real)
        scaler.scale(g_loss).backward()
        scaler.step(g_optimizer)
        scaler.update()

        # discriminator turn
        for p in d_model.parameters():
            p.requires_grad_(True)
        d_optimizer.zero_grad(set_to_none=True)
        with autocast("cuda", dtype=torch.float16):
            d_loss = adv_criterion(d_model(gt), real) + adv_criterion(d_model(sr.detach()), fake)
        scaler.scale(d_loss).backward()
        scaler.step(g_optimizer)  # <- here
        scaler.update()
        batch = prefetcher.next()


def main():
    d, g = models.discriminator().cuda(), models.rrdbnet_x4().cuda()
    d_opt = optim.Adam(d.parameters(), 1e-4)
    g_opt = optim.Adam(g.parameters(), 1e-4)
    scaler = GradScaler("cuda")
    loader = CUDAPrefetcher(build_loader("train"))
    for _ in range(100):
        train(d, g, loader, nn.L1Loss(), nn.BCEWithLogitsLoss(), d_opt, g_opt, scaler, {"pixel": 0.01, "adv": 0.005})


if __name__ == "__main__":
    main()
