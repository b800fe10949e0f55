# source: https://github.com/Lightning-AI/pytorch-lightning/issues/19695
# mistake: with manual optimization and 16-mixed, backward is called on the tensor and not through manual_backward, so the loss is never scaled and the step fails
# severity: error
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class Dynamics(nn.Module):
    def __init__(self, latent, actions):
        super().__init__()
        self.cell = nn.GRUCell(latent + actions, latent)
        self.reward = nn.Linear(latent, 1)

    def forward(self, z, a):
        nxt = self.cell(torch.cat([z, a], dim=-1), z)
        return nxt, self.reward(nxt).squeeze(-1)


class WorldModel(L.LightningModule):
    def __init__(self, obs_dim, actions, latent=256, lr_repr=3e-4, lr_dyn=1e-4):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.encoder = nn.Sequential(nn.Linear(obs_dim, 512), nn.ELU(), nn.Linear(512, latent))
        self.decoder = nn.Sequential(nn.Linear(latent, 512), nn.ELU(), nn.Linear(512, obs_dim))
        self.dynamics = Dynamics(latent, actions)

    def configure_optimizers(self):
        representation = torch.optim.Adam([*self.encoder.parameters(), *self.decoder.parameters()], lr=self.hparams.lr_repr)
        dynamics = torch.optim.Adam(self.dynamics.parameters(), lr=self.hparams.lr_dyn)
        return [representation, dynamics]

    def training_step(self, batch, batch_idx):
        opt_repr, opt_dyn = self.optimizers()
        obs, act, rew, nxt = batch["obs"], batch["act"], batch["rew"], batch["next_obs"]

        z = self.encoder(obs)
        recon = F.mse_loss(self.decoder(z).float(), obs)
        opt_repr.zero_grad()
        recon.backward()  # <- here
        opt_repr.step()

        with torch.no_grad():
            z_now, z_next = self.encoder(obs), self.encoder(nxt)
        z_hat, r_hat = self.dynamics(z_now, act)
        model_loss = F.mse_loss(z_hat.float(), z_next.float()) + F.mse_loss(r_hat.float(), rew)
        opt_dyn.zero_grad()
        model_loss.backward()  # <- here
        opt_dyn.step()

        self.log_dict({"recon": recon.detach(), "model": model_loss.detach()}, prog_bar=True)

    def validation_step(self, batch, batch_idx):
        z_hat, _ = self.dynamics(self.encoder(batch["obs"]), batch["act"])
        error = F.mse_loss(self.decoder(z_hat).float(), batch["next_obs"])
        self.log("val_error", error)


def launch(datamodule, obs_dim, actions):
    module = WorldModel(obs_dim, actions)
    trainer = L.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=50, log_every_n_steps=20)
    trainer.fit(module, datamodule=datamodule)
    return module
