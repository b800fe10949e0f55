import torch


class GanTrainer:
    def __init__(self, generator, discriminator, lr):
        self.generator = generator
        self.discriminator = discriminator
        self.opt_g = torch.optim.Adam(generator.parameters(), lr=lr)
        self.opt_d = torch.optim.Adam(discriminator.parameters(), lr=lr)
        self.scaler_g = torch.amp.GradScaler("cuda")
        self.scaler_d = torch.amp.GradScaler("cuda")

    def train_step(self, real, z):
        self.opt_d.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            fake = self.generator(z)
            d_loss = self.d_loss(self.discriminator(real), self.discriminator(fake.detach()))
        self.scaler_d.scale(d_loss).backward()
        self.scaler_d.step(self.opt_d)
        self.scaler_d.update()

        self.opt_g.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            g_loss = self.g_loss(self.discriminator(fake))
        self.scaler_g.scale(g_loss).backward()
        self.scaler_g.step(self.opt_g)
        self.scaler_g.update()
        return {"d": d_loss.detach(), "g": g_loss.detach()}

    def d_loss(self, real, fake):
        return torch.relu(1 - real).mean() + torch.relu(1 + fake).mean()

    def g_loss(self, fake):
        return -fake.mean()
