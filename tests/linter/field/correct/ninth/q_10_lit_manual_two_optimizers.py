# why correct: manual optimization goes through self.manual_backward and the Lightning optimizers, which handle scaling under 16-mixed
import lightning.pytorch as pl
import torch
import torch.nn as nn
import torch.nn.functional as F


class Encoder(nn.Module):
    def __init__(self, dim=128):
        super().__init__()
        self.net = nn.Sequential(nn.Conv2d(3, 64, 4, 2, 1), nn.ReLU(), nn.Conv2d(64, 128, 4, 2, 1), nn.ReLU(),
                                 nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, dim))

    def forward(self, x):
        return self.net(x)


class AdversarialFairness(pl.LightningModule):
    """The encoder must classify the task and hide the site the image came from."""

    def __init__(self, classes, sites, lr=1e-3, hide=0.5):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.encoder = Encoder()
        self.task = nn.Linear(128, classes)
        self.adversary = nn.Sequential(nn.Linear(128, 64), nn.ReLU(), nn.Linear(64, sites))

    def configure_optimizers(self):
        main = torch.optim.Adam([*self.encoder.parameters(), *self.task.parameters()], lr=self.hparams.lr)
        adv = torch.optim.Adam(self.adversary.parameters(), lr=self.hparams.lr)
        sched = torch.optim.lr_scheduler.StepLR(main, 10, 0.5)
        return [main, adv], [sched]

    def training_step(self, batch, batch_idx):
        image, label, site = batch
        main, adv = self.optimizers()

        with torch.no_grad():
            with torch.autocast("cuda", enabled=False):
                frozen = self.encoder(image.float())
        site_loss = F.cross_entropy(self.adversary(frozen), site)
        adv.zero_grad()
        self.manual_backward(site_loss)
        adv.step()

        self.toggle_optimizer(main)
        z = self.encoder(image)
        task_loss = F.cross_entropy(self.task(z), label)
        loss = task_loss - self.hparams.hide * F.cross_entropy(self.adversary(z), site)
        main.zero_grad()
        self.manual_backward(loss)
        main.step()
        self.untoggle_optimizer(main)
        self.log_dict({"task": task_loss, "site": site_loss}, prog_bar=True)

    def on_train_epoch_end(self):
        self.lr_schedulers().step()


def main(datamodule):
    pl.seed_everything(3)
    model = AdversarialFairness(classes=2, sites=11)
    trainer = pl.Trainer(accelerator="gpu", devices=1, precision="16-mixed", max_epochs=30)
    trainer.fit(model, datamodule=datamodule)
