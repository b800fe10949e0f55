# source: Lightning-AI/pytorch-lightning issue #18740
# mistake: with manual optimization under precision "16-mixed" the module calls loss.backward() itself, so the loss is never scaled although opt.step() goes through the GradScaler (raises, since no scale exists yet)
# severity: error
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint


class StudentHead(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.fc = nn.Linear(dim, classes)

    def forward(self, z):
        return self.fc(self.norm(z))


class TwoPhaseDistiller(L.LightningModule):
    """Backbone and head have optimizers of their own; the head is stepped twice as often."""

    def __init__(self, student, teacher, dim=384, classes=1000, tau=2.0, lr=1e-3):
        super().__init__()
        self.automatic_optimization = False
        self.save_hyperparameters(ignore=["student", "teacher"])
        self.student = student
        self.teacher = teacher.eval().requires_grad_(False)
        self.head = StudentHead(dim, classes)

    def kd(self, logits, soft):
        t = self.hparams.tau
        return F.kl_div(F.log_softmax(logits.float() / t, -1), F.softmax(soft.float() / t, -1),
                        reduction="batchmean") * t * t

    def training_step(self, batch, batch_idx):
        img, label = batch
        opt_body, opt_head = self.optimizers()

        with torch.no_grad():
            soft = self.teacher(img)

        logits = self.head(self.student(img))
        ce = F.cross_entropy(logits, label)
        loss = 0.3 * ce + 0.7 * self.kd(logits, soft)

        opt_body.zero_grad()
        opt_head.zero_grad()
        loss.backward()  # <- here
        opt_head.step()
        if batch_idx % 2 == 1:
            opt_body.step()

        self.log_dict({"train/ce": ce, "train/loss": loss}, prog_bar=True)

    def on_train_epoch_end(self):
        for s in self.lr_schedulers():
            s.step()

    def validation_step(self, batch, batch_idx):
        img, label = batch
        logits = self.head(self.student(img))
        self.log("val/acc", (logits.argmax(-1) == label).float().mean(), sync_dist=True)

    def configure_optimizers(self):
        body = torch.optim.SGD(self.student.parameters(), lr=self.hparams.lr, momentum=0.9)
        head = torch.optim.SGD(self.head.parameters(), lr=10 * self.hparams.lr, momentum=0.9)
        cos = torch.optim.lr_scheduler.CosineAnnealingLR
        return [body, head], [cos(body, 90), cos(head, 90)]


def build_trainer(devices=4, epochs=90):
    return L.Trainer(
        accelerator="gpu",
        devices=devices,
        precision="16-mixed",
        max_epochs=epochs,
        callbacks=[ModelCheckpoint(monitor="val/acc", mode="max"), LearningRateMonitor()],
        log_every_n_steps=20,
    )


def main(student, teacher, datamodule):
    module = TwoPhaseDistiller(student, teacher)
    build_trainer().fit(module, datamodule=datamodule)
    return module
