import torch
import torch.nn.functional as F


def train(vae, loader, optimizer, beta):
    scaler = torch.amp.GradScaler("cuda")
    for x in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            recon, mu, logvar = vae(x)
            rec = F.binary_cross_entropy_with_logits(recon, x, reduction="sum")
            kld = -0.5 * torch.sum(1 + logvar - mu.pow(2) - logvar.exp())
            loss = rec + beta * kld
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
