import torch
import torch.nn as nn

netG = nn.Sequential(nn.Linear(16, 64)).cuda()
netD = nn.Sequential(nn.Linear(64, 1)).cuda()
optimizerG = torch.optim.Adam(netG.parameters(), lr=2e-4, betas=(0.5, 0.999))
optimizerD = torch.optim.Adam(netD.parameters(), lr=2e-4, betas=(0.5, 0.999))
criterion = nn.BCEWithLogitsLoss()
scaler = torch.amp.GradScaler("cuda")


def train(dataloader, device):
    for i, data in enumerate(dataloader):
        netD.zero_grad()
        real = data.to(device)
        noise = torch.randn(real.size(0), 16, device=device)
        with torch.autocast("cuda", dtype=torch.float16):
            output = netD(real).view(-1)
            errD_real = criterion(output, torch.ones_like(output))
        scaler.scale(errD_real).backward()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = netG(noise)
            output = netD(fake.detach()).view(-1)
            errD_fake = criterion(output, torch.zeros_like(output))
        scaler.scale(errD_fake).backward()
        scaler.step(optimizerD)

        netG.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            output = netD(fake).view(-1)
            errG = criterion(output, torch.ones_like(output))
        scaler.scale(errG).backward()
        scaler.step(optimizerG)
        scaler.update()
