# style of: NVIDIA/apex:examples/dcgan/main_amp.py
# torch: any
import torch
import torch.nn as nn
import torch.optim as optim
from apex import amp

from dcgan import Discriminator, Generator, weights_init


def run(opt, dataloader):
    device = torch.device("cuda:0")
    netG = Generator(opt.nz, opt.ngf).to(device)
    netG.apply(weights_init)
    netD = Discriminator(opt.ndf).to(device)
    netD.apply(weights_init)
    # logits in, so it is safe in half precision
    criterion = nn.BCEWithLogitsLoss()

    optimizerD = optim.Adam(netD.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    optimizerG = optim.Adam(netG.parameters(), lr=opt.lr, betas=(opt.beta1, 0.999))
    [netD, netG], [optimizerD, optimizerG] = amp.initialize(
        [netD, netG], [optimizerD, optimizerG], opt_level=opt.opt_level, num_losses=3
    )

    for epoch in range(opt.niter):
        for i, (real, _) in enumerate(dataloader):
            netD.zero_grad()
            real = real.to(device)
            label = torch.full((real.size(0),), 1.0, device=device)
            errD_real = criterion(netD(real).view(-1), label)
            with amp.scale_loss(errD_real, optimizerD, loss_id=0) as errD_real_scaled:
                errD_real_scaled.backward()

            noise = torch.randn(real.size(0), opt.nz, 1, 1, device=device)
            fake = netG(noise)
            label.fill_(0.0)
            errD_fake = criterion(netD(fake.detach()).view(-1), label)
            with amp.scale_loss(errD_fake, optimizerD, loss_id=1) as errD_fake_scaled:
                errD_fake_scaled.backward()
            optimizerD.step()

            netG.zero_grad()
            label.fill_(1.0)
            errG = criterion(netD(fake).view(-1), label)
            with amp.scale_loss(errG, optimizerG, loss_id=2) as errG_scaled:
                errG_scaled.backward()
            optimizerG.step()

            if i % 50 == 0:
                print(f"[{epoch}/{opt.niter}][{i}] D {(errD_real + errD_fake).item():.3f} G {errG.item():.3f}")

        torch.save(
            {
                "G": netG.state_dict(),
                "D": netD.state_dict(),
                "optG": optimizerG.state_dict(),
                "optD": optimizerD.state_dict(),
                "amp": amp.state_dict(),
            },
            f"{opt.outf}/epoch_{epoch}.pth",
        )
