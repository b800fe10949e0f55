"""
# style of: Lightning-AI/pytorch-lightning:docs/source-pytorch/common/optimization.rst
# correct: configure_gradient_clipping is called by the trainer after its precision plugin has unscaled, so clipping and reading norms there is right under 16-mixed.
# torch: 2.1+
"""
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.data import DataLoader, TensorDataset


class Seq2SeqModule(L.LightningModule):
    def __init__(self, vocab=1000, width=256, lr=5e-4, warmup=400):
        super().__init__()
        self.save_hyperparameters()
        self.embed = nn.Embedding(vocab, width)
        self.rnn = nn.GRU(width, width, num_layers=2, batch_first=True)
        self.out = nn.Linear(width, vocab)

    def forward(self, ids):
        h, _ = self.rnn(self.embed(ids))
        return self.out(h)

    def training_step(self, batch, batch_idx):
        (ids,) = batch
        logits = self(ids[:, :-1])
        loss = F.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())
        self.log("train/loss", loss)
        return loss

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        # a lower limit while the recurrent part settles
        limit = gradient_clip_val if self.global_step > self.hparams.warmup else 0.1 * gradient_clip_val
        rnn_norm = torch.nn.utils.clip_grad_norm_(self.rnn.parameters(), limit)
        self.log("grad/rnn", rnn_norm)
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm=gradient_clip_algorithm)

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        warm = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=self.hparams.warmup)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm, "interval": "step"}}


class GradNormPrinter(L.Callback):
    def on_before_optimizer_step(self, trainer, pl_module, optimizer):
        if trainer.global_step % 100 == 0:
            worst = max((p.grad.norm().item(), n) for n, p in pl_module.named_parameters() if p.grad is not None)
            print(f"largest gradient {worst[0]:.3e} in {worst[1]}")


if __name__ == "__main__":
    L.seed_everything(0)
    loader = DataLoader(TensorDataset(torch.randint(0, 1000, (8192, 65))), batch_size=64, shuffle=True)
    trainer = L.Trainer(
        max_epochs=3,
        accelerator="gpu",
        devices=1,
        precision="16-mixed",
        accumulate_grad_batches=2,
        gradient_clip_val=1.0,
        callbacks=[GradNormPrinter()],
    )
    trainer.fit(Seq2SeqModule(), loader)
