"""
# style of: CompVis/taming-transformers:taming/models/vqgan.py (ported to Lightning 2)
# correct: manual optimisation with bf16-mixed has no loss scaling, so clipping straight after manual_backward is right.
# torch: 2.1+
"""
import lightning as L
import torch
import torch.nn.functional as F

from vq_modules import Decoder, Encoder, NLayerDiscriminator, VectorQuantizer


class VQGAN(L.LightningModule):
    def __init__(self, n_embed=1024, embed_dim=256, lr=4.5e-6, disc_start=10_000, clip=1.0):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters()
        self.encoder, self.decoder = Encoder(embed_dim), Decoder(embed_dim)
        self.quantize = VectorQuantizer(n_embed, embed_dim, beta=0.25)
        self.discriminator = NLayerDiscriminator()

    def forward(self, x):
        quant, emb_loss = self.quantize(self.encoder(x))
        return self.decoder(quant), emb_loss

    def training_step(self, batch, batch_idx):
        x = batch["image"]
        opt_ae, opt_disc = self.optimizers()
        adversarial = self.global_step // 2 >= self.hparams.disc_start

        self.toggle_optimizer(opt_ae)
        xrec, emb_loss = self(x)
        rec_loss = F.l1_loss(xrec.float(), x)
        loss = rec_loss + emb_loss
        if adversarial:
            loss = loss - 0.1 * self.discriminator(xrec).float().mean()
        self.manual_backward(loss)
        self.clip_gradients(opt_ae, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
        opt_ae.step()
        opt_ae.zero_grad()
        self.untoggle_optimizer(opt_ae)

        self.toggle_optimizer(opt_disc)
        real, fake = self.discriminator(x), self.discriminator(xrec.detach())
        d_loss = 0.5 * (F.relu(1 - real.float()).mean() + F.relu(1 + fake.float()).mean())
        self.manual_backward(d_loss if adversarial else 0.0 * d_loss)
        self.clip_gradients(opt_disc, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
        opt_disc.step()
        opt_disc.zero_grad()
        self.untoggle_optimizer(opt_disc)
        self.log_dict({"rec": rec_loss, "disc": d_loss}, prog_bar=True)

    def configure_optimizers(self):
        ae = [*self.encoder.parameters(), *self.decoder.parameters(), *self.quantize.parameters()]
        return (
            torch.optim.Adam(ae, lr=self.hparams.lr, betas=(0.5, 0.9)),
            torch.optim.Adam(self.discriminator.parameters(), lr=self.hparams.lr, betas=(0.5, 0.9)),
        )


def main(loader):
    L.Trainer(accelerator="gpu", devices=1, precision="bf16-mixed", max_steps=500_000).fit(VQGAN(), loader)
