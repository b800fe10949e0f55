import torch
import torch.nn.functional as F


class Diffusion:
    def __init__(self, unet, timesteps, device):
        self.unet = unet.to(device)
        self.device = device
        self.betas = torch.linspace(1e-4, 0.02, timesteps, device=device)
        self.alphas = torch.cumprod(1.0 - self.betas, dim=0)

    def q_sample(self, x, t, noise):
        a = self.alphas[t].view(-1, 1, 1, 1)
        return a.sqrt() * x + (1 - a).sqrt() * noise

    def loss(self, x):
        t = torch.randint(0, len(self.betas), (x.size(0),), device=self.device)
        noise = torch.randn_like(x)
        return F.mse_loss(self.unet(self.q_sample(x, t, noise), t), noise)


class Runner:
    def __init__(self, diffusion, loader, lr, accum, amp=True):
        self.diffusion, self.loader, self.accum = diffusion, loader, accum
        self.optimizer = torch.optim.AdamW(diffusion.unet.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp)
        self.amp = amp

    def run(self, steps):
        data = iter(self.loader)
        for step in range(steps):
            for _ in range(self.accum):
                x = next(data)
                with torch.autocast("cuda", enabled=self.amp):
                    loss = self.diffusion.loss(x)
                self.scaler.scale(loss / self.accum).backward()
            self.scaler.unscale_(self.optimizer)
            torch.nn.utils.clip_grad_norm_(self.diffusion.unet.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
            if step % 1000 == 0:
                print(step, loss.item())
