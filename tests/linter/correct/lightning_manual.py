import pytorch_lightning as pl
import torch


class Gan(pl.LightningModule):
    def __init__(self, generator, discriminator):
        super().__init__()
        self.automatic_optimization = False
        self.generator = generator
        self.discriminator = discriminator

    def training_step(self, batch, batch_idx):
        g_opt, d_opt = self.optimizers()
        z = torch.randn(batch.shape[0], 64).type_as(batch)
        fake = self.generator(z)
        d_loss = -self.discriminator(batch).mean() + self.discriminator(fake.detach()).mean()
        d_opt.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(d_opt, gradient_clip_val=0.5, gradient_clip_algorithm="norm")
        d_opt.step()
        g_loss = -self.discriminator(fake).mean()
        g_opt.zero_grad()
        self.manual_backward(g_loss)
        g_opt.step()
        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def configure_optimizers(self):
        g_opt = torch.optim.Adam(self.generator.parameters(), lr=1e-4)
        d_opt = torch.optim.Adam(self.discriminator.parameters(), lr=1e-4)
        return g_opt, d_opt
