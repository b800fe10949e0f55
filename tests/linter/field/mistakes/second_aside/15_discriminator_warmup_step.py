"""
# source: https://github.com/AllenCell/cyto-dl/issues/21
# mistake: before disc_start no backward pass reaches the discriminator, yet scaler.step(opt_d) runs, which raises AssertionError (no inf checks were recorded for this optimizer).
# severity: error
# torch: any
"""
import torch
from torch import nn
from torch.nn import functional as F


class PatchDiscriminator(nn.Module):
    def __init__(self, channels=1, width=64):
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv3d(channels, width, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv3d(width, width * 2, 4, 2, 1),
            nn.LeakyReLU(0.2),
            nn.Conv3d(width * 2, 1, 3, 1, 1),
        )

    def forward(self, x):
        return self.body(x)


class ImageToImageGAN:
    def __init__(self, generator, disc_start=2000, amp=True):
        self.generator = generator.cuda()
        self.discriminator = PatchDiscriminator().cuda()
        self.opt_g = torch.optim.Adam(self.generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.opt_d = torch.optim.Adam(self.discriminator.parameters(), lr=2e-4, betas=(0.5, 0.999))
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp)
        self.amp = amp
        self.disc_start = disc_start
        self.global_step = 0

    def training_step(self, raw, target):
        adversarial = self.global_step >= self.disc_start
        self.opt_g.zero_grad()
        self.opt_d.zero_grad()

        with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
            fake = self.generator(raw)
            loss_g = F.l1_loss(fake, target)
            if adversarial:
                self.discriminator.requires_grad_(False)
                loss_g = loss_g - 0.01 * self.discriminator(fake).mean()
                self.discriminator.requires_grad_(True)
        self.scaler.scale(loss_g).backward()

        if adversarial:
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
                real_logit = self.discriminator(target)
                fake_logit = self.discriminator(fake.detach())
                loss_d = F.relu(1 - real_logit).mean() + F.relu(1 + fake_logit).mean()
            self.scaler.scale(loss_d).backward()

        self.scaler.step(self.opt_g)
        self.scaler.step(self.opt_d)  # <- here
        self.scaler.update()
        self.global_step += 1
        return loss_g.item()


def fit(model, loader, epochs):
    for epoch in range(epochs):
        losses = [model.training_step(x.cuda(), y.cuda()) for x, y in loader]
        print(epoch, sum(losses) / len(losses))
