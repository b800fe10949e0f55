# source: Lightning-AI/pytorch-lightning issue #19695
# mistake: with manual optimization and 16-mixed the module calls loss.backward() instead of self.manual_backward(loss), so the loss is never scaled and the optimizer wrapper fails in unscale_ (_scale is None)
# severity: error
import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch import nn


def projector(i, o):
    return nn.Sequential(nn.Linear(i, 2 * i), nn.GELU(), nn.Linear(2 * i, o))


class AudioTextModule(pl.LightningModule):
    def __init__(self, audio_encoder: nn.Module, text_encoder: nn.Module, dim=512, out=256, lr=3e-4, tau_lr=1e-3):
        super().__init__()
        self.save_hyperparameters(ignore=["audio_encoder", "text_encoder"])
        self.automatic_optimization = False
        self.audio_encoder, self.text_encoder = audio_encoder, text_encoder
        self.audio_proj, self.text_proj = projector(dim, out), projector(dim, out)
        self.log_tau = nn.Parameter(torch.tensor(0.07).log())

    def forward(self, audio, tokens):
        a = F.normalize(self.audio_proj(self.audio_encoder(audio)).float(), dim=-1)
        t = F.normalize(self.text_proj(self.text_encoder(tokens)).float(), dim=-1)
        return a, t

    def _pair_loss(self, a, t):
        with torch.autocast("cuda", enabled=False):
            logits = a @ t.T / self.log_tau.exp().clamp(min=0.01)
            y = torch.arange(len(a), device=a.device)
            return 0.5 * (F.cross_entropy(logits, y) + F.cross_entropy(logits.T, y))

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        loss = self._pair_loss(*self(batch["audio"], batch["tokens"]))

        opt.zero_grad()
        loss.backward()  # <- here
        opt.step()

        self.log("train/loss", loss, prog_bar=True)
        self.log("train/tau", self.log_tau.exp())

    def on_train_epoch_end(self):
        self.lr_schedulers().step()

    def validation_step(self, batch, batch_idx):
        a, t = self(batch["audio"], batch["tokens"])
        rank = (a @ t.T).argsort(dim=-1, descending=True)
        hit = (rank[:, :5] == torch.arange(len(a), device=a.device)[:, None]).any(-1)
        self.log("val/r5", hit.float().mean(), sync_dist=True)

    def configure_optimizers(self):
        body = [p for n, p in self.named_parameters() if n != "log_tau"]
        opt = torch.optim.AdamW([
            {"params": body, "weight_decay": 0.1},
            {"params": [self.log_tau], "lr": self.hparams.tau_lr, "weight_decay": 0.0},
        ], lr=self.hparams.lr)
        return [opt], [torch.optim.lr_scheduler.CosineAnnealingLR(opt, 40)]


def launch(datamodule, audio_encoder, text_encoder):
    module = AudioTextModule(audio_encoder, text_encoder)
    trainer = pl.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=40,  # <- here
                         callbacks=[pl.callbacks.ModelCheckpoint(monitor="val/r5", mode="max")])
    trainer.fit(module, datamodule=datamodule)
