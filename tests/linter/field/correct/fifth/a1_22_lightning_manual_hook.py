# why correct: with manual optimization, clipping and norm logging sit in on_before_optimizer_step, which Lightning calls after it has unscaled the gradients
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.utilities import grad_norm


class AlternatingAligner(L.LightningModule):
    """Audio and text encoders, trained in turns against each other's frozen embeddings."""

    def __init__(self, audio: nn.Module, text: nn.Module, lr=1e-4, limit=1.0):
        super().__init__()
        self.automatic_optimization = False
        self.audio, self.text = audio, text
        self.lr, self.limit = lr, limit

    def nce(self, a, t):
        a = F.normalize(a.float(), dim=-1)
        t = F.normalize(t.float(), dim=-1)
        logits = (a @ t.t()).float() / 0.07
        target = torch.arange(len(a), device=a.device)
        return 0.5 * (F.cross_entropy(logits, target) + F.cross_entropy(logits.t(), target))

    def turn(self, optimizer, loss):
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()

    def training_step(self, batch, batch_idx):
        opt_a, opt_t = self.optimizers()
        wav, ids = batch
        if batch_idx % 2 == 0:
            with torch.no_grad():
                t = self.text(ids)
            loss = self.nce(self.audio(wav), t)
            self.turn(opt_a, loss)
        else:
            with torch.no_grad():
                a = self.audio(wav)
            loss = self.nce(a, self.text(ids))
            self.turn(opt_t, loss)
        self.log("nce", loss.detach(), prog_bar=True)

    def on_before_optimizer_step(self, optimizer):
        params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        nn.utils.clip_grad_norm_(params, self.limit)
        if self.trainer.global_step % 100 == 0:
            self.log_dict(grad_norm(self, norm_type=2))

    def on_train_epoch_end(self):
        for sched in self.lr_schedulers():
            sched.step()

    def configure_optimizers(self):
        opts = [torch.optim.AdamW(m.parameters(), lr=self.lr) for m in (self.audio, self.text)]
        return opts, [torch.optim.lr_scheduler.ExponentialLR(o, 0.95) for o in opts]


def main(audio, text, loader):
    trainer = L.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=20)
    trainer.fit(AlternatingAligner(audio, text), loader)
