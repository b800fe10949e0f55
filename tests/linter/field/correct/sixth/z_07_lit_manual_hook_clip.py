# why correct: manual optimization goes through manual_backward and the wrapped optimizer, and clipping sits in on_before_optimizer_step, which Lightning calls after unscaling
import lightning.pytorch as pl
import torch
from torch import nn
from torch.nn import functional as F


class VectorQuantiser(nn.Module):
    def __init__(self, n=1024, d=64, beta=0.25):
        super().__init__()
        self.book, self.beta = nn.Embedding(n, d), beta
        nn.init.uniform_(self.book.weight, -1 / n, 1 / n)

    @torch.autocast("cuda", enabled=False)
    def forward(self, z):
        z = z.float()
        flat = z.permute(0, 2, 3, 1).reshape(-1, z.shape[1])
        idx = torch.cdist(flat, self.book.weight).argmin(1)
        q = self.book(idx).view(z.shape[0], *z.shape[2:], -1).permute(0, 3, 1, 2)
        loss = F.mse_loss(q, z.detach()) + self.beta * F.mse_loss(z, q.detach())
        return z + (q - z).detach(), loss


class VQModule(pl.LightningModule):
    def __init__(self, encoder, decoder, disc, disc_start=20_000, lr=4.5e-6):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters("disc_start", "lr")
        self.encoder, self.decoder, self.disc = encoder, decoder, disc
        self.vq = VectorQuantiser()

    def on_before_optimizer_step(self, optimizer):
        params = [p for group in optimizer.param_groups for p in group["params"]]
        norm = nn.utils.clip_grad_norm_(params, 1.0)
        self.log("grad_norm", norm)

    def _reconstruct(self, x):
        q, vq_loss = self.vq(self.encoder(x))
        return self.decoder(q), vq_loss

    def training_step(self, x, batch_idx):
        opt_ae, opt_d = self.optimizers()
        adversarial = self.global_step // 2 >= self.hparams.disc_start

        self.toggle_optimizer(opt_ae)
        rec, vq_loss = self._reconstruct(x)
        loss = F.l1_loss(rec, x) + vq_loss
        if adversarial:
            loss = loss - 0.1 * self.disc(rec).float().mean()
        opt_ae.zero_grad()
        self.manual_backward(loss)
        opt_ae.step()
        self.untoggle_optimizer(opt_ae)

        self.toggle_optimizer(opt_d)
        d_loss = F.relu(1 - self.disc(x).float()).mean() + F.relu(1 + self.disc(rec.detach()).float()).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        opt_d.step()
        self.untoggle_optimizer(opt_d)
        self.log_dict({"ae": loss, "d": d_loss}, prog_bar=True)

    def configure_optimizers(self):
        ae = [*self.encoder.parameters(), *self.decoder.parameters(), *self.vq.parameters()]
        return (torch.optim.Adam(ae, self.hparams.lr, betas=(0.5, 0.9)),
                torch.optim.Adam(self.disc.parameters(), self.hparams.lr, betas=(0.5, 0.9)))


def main(encoder, decoder, disc, loader):
    pl.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_steps=600_000).fit(
        VQModule(encoder, decoder, disc), loader)
