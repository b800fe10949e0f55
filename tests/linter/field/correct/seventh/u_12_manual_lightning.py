# why correct: manual optimization goes through manual_backward and Lightning's optimizers; bf16-mixed has no loss scale, so clip_gradients sees true gradients
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


class DualEncoder(L.LightningModule):
    def __init__(self, audio, text, dim=256, accumulate=4, clip=1.0):
        super().__init__()
        self.save_hyperparameters(ignore=["audio", "text"])
        self.automatic_optimization = False
        self.audio = audio
        self.text = text
        self.log_temp = nn.Parameter(torch.tensor(2.6593))

    def embed(self, clip, tokens):
        a = F.normalize(self.audio(clip).float(), dim=-1)
        t = F.normalize(self.text(tokens).float(), dim=-1)
        return a, t

    def contrastive(self, a, t):
        with torch.autocast(self.device.type, enabled=False):
            logits = self.log_temp.exp().clamp(max=100.0) * a @ t.T
            target = torch.arange(len(a), device=a.device)
            return (F.cross_entropy(logits, target) + F.cross_entropy(logits.T, target)) / 2

    def _boundary(self, batch_idx):
        last = batch_idx + 1 == self.trainer.num_training_batches
        return last or (batch_idx + 1) % self.hparams.accumulate == 0

    def _window(self, batch_idx):
        start = batch_idx - batch_idx % self.hparams.accumulate
        return min(self.hparams.accumulate, self.trainer.num_training_batches - start)

    def training_step(self, batch, batch_idx):
        opt = self.optimizers()
        loss = self.contrastive(*self.embed(*batch))
        self.manual_backward(loss / self._window(batch_idx))
        if self._boundary(batch_idx):
            self.clip_gradients(opt, gradient_clip_val=self.hparams.clip, gradient_clip_algorithm="norm")
            opt.step()
            opt.zero_grad()
            self.lr_schedulers().step()
        self.log("train/loss", loss, prog_bar=True)

    def configure_optimizers(self):
        opt = torch.optim.AdamW(self.parameters(), lr=5e-4, betas=(0.9, 0.98), eps=1e-6)
        sched = torch.optim.lr_scheduler.CosineAnnealingLR(opt, T_max=20_000)
        return [opt], [sched]


def main(audio, text, dm):
    trainer = L.Trainer(accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=30)
    trainer.fit(DualEncoder(audio, text), datamodule=dm)
