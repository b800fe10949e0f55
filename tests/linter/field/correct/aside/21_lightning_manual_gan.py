# style of: Lightning-AI/pytorch-lightning:docs/source-pytorch/model/manual_optimization.rst
# torch: 2.1+
import lightning as L
import torch
from torch import nn
import torch.nn.functional as F


class ManualGAN(L.LightningModule):
    def __init__(self, latent=64, lr=2e-4):
        super().__init__()
        self.save_hyperparameters()
        # two optimizers, so the steps are taken by hand
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(latent, 256), nn.ReLU(), nn.Linear(256, 784))
        self.critic = nn.Sequential(nn.Linear(784, 256), nn.LeakyReLU(0.2), nn.Linear(256, 1))

    def forward(self, z):
        return torch.tanh(self.generator(z))

    def training_step(self, batch, batch_idx):
        real, _ = batch
        real = real.flatten(1)
        opt_g, opt_d = self.optimizers()
        z = torch.randn(real.size(0), self.hparams.latent, device=self.device)

        self.toggle_optimizer(opt_d)
        fake = self(z).detach()
        d_real, d_fake = self.critic(real), self.critic(fake)
        d_loss = F.binary_cross_entropy_with_logits(d_real, torch.ones_like(d_real))
        d_loss = d_loss + F.binary_cross_entropy_with_logits(d_fake, torch.zeros_like(d_fake))
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        d_fake = self.critic(self(z))
        g_loss = F.binary_cross_entropy_with_logits(d_fake, torch.ones_like(d_fake))
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        opt_g.step()
        self.untoggle_optimizer(opt_g)

        self.log_dict({"g_loss": g_loss, "d_loss": d_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        for sch in self.lr_schedulers():
            sch.step()

    def configure_optimizers(self):
        opt_g = torch.optim.Adam(self.generator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        opt_d = torch.optim.Adam(self.critic.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
        sch_g = torch.optim.lr_scheduler.StepLR(opt_g, 10, gamma=0.5)
        sch_d = torch.optim.lr_scheduler.StepLR(opt_d, 10, gamma=0.5)
        return [opt_g, opt_d], [sch_g, sch_d]


def fit(loader):
    # the 16-mixed plugin scales in manual_backward and unscales in opt.step()
    trainer = L.Trainer(max_epochs=20, accelerator="gpu", devices=1, precision="16-mixed")
    trainer.fit(ManualGAN(), loader)
    return trainer
