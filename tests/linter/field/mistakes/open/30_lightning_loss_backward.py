# source: https://github.com/Lightning-AI/pytorch-lightning/issues/19695
# mistake: with manual optimisation and 16-mixed precision the module calls loss.backward() instead of self.manual_backward(loss), so the loss is never scaled and the step raises.
# severity: error
# torch: any
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F


class SurvivalVAE(L.LightningModule):
    def __init__(self, n_in=128, n_latent=16):
        super().__init__()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(n_in, 64), nn.ReLU(), nn.Linear(64, 2 * n_latent))
        self.decoder = nn.Sequential(nn.Linear(n_latent, 64), nn.ReLU(), nn.Linear(64, n_in))
        self.head = nn.Linear(n_latent, 1)

    def configure_optimizers(self):
        vae = torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=1e-3)
        head = torch.optim.Adam(self.head.parameters(), lr=1e-4)
        return [vae, head]

    def training_step(self, batch, batch_idx):
        x, risk = batch
        opt_vae, opt_head = self.optimizers()

        mu, logvar = self.encoder(x).chunk(2, dim=-1)
        z = mu + torch.randn_like(mu) * (0.5 * logvar).exp()
        recon = F.mse_loss(self.decoder(z), x)
        kl = -0.5 * (1 + logvar - mu.pow(2) - logvar.exp()).mean()
        loss_vae = recon + 1e-3 * kl
        opt_vae.zero_grad()
        loss_vae.backward()  # <- here
        opt_vae.step()

        loss_head = F.mse_loss(self.head(mu.detach()), risk)
        opt_head.zero_grad()
        loss_head.backward()  # <- here
        opt_head.step()
        self.log_dict({"recon": recon, "kl": kl, "head": loss_head}, prog_bar=True)


if __name__ == "__main__":
    data = torch.utils.data.TensorDataset(torch.randn(2048, 128), torch.rand(2048, 1))
    trainer = L.Trainer(max_epochs=5, accelerator="gpu", devices=1, precision="16-mixed")
    trainer.fit(SurvivalVAE(), torch.utils.data.DataLoader(data, batch_size=64))
