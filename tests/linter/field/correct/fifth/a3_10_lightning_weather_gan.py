# why correct: manual optimization uses manual_backward for both losses, and bf16-mixed has no loss scale, so clipping right after the backward sees true gradients
import lightning as L
import torch
import torch.nn.functional as F
from torch import nn


def block(i, o, stride=1):
    return nn.Sequential(nn.Conv2d(i, o, 3, stride, 1), nn.LeakyReLU(0.2))


class Downscaler(nn.Module):
    def __init__(self, fields, ch=64, factor=4):
        super().__init__()
        self.body = nn.Sequential(block(fields + 1, ch), *[block(ch, ch) for _ in range(6)])
        self.up = nn.Sequential(nn.Conv2d(ch, ch * factor ** 2, 3, 1, 1), nn.PixelShuffle(factor))
        self.out = nn.Conv2d(ch, fields, 3, 1, 1)

    def forward(self, coarse):
        noise = torch.randn_like(coarse[:, :1])
        return self.out(self.up(self.body(torch.cat([coarse, noise], 1))))


class Judge(nn.Module):
    def __init__(self, fields, ch=64):
        super().__init__()
        self.net = nn.Sequential(block(fields, ch, 2), block(ch, 2 * ch, 2), block(2 * ch, 4 * ch, 2), nn.Conv2d(4 * ch, 1, 3, 1, 1))

    def forward(self, x):
        return self.net(x)


class DownscalingGAN(L.LightningModule):
    def __init__(self, fields=4, lr_g=1e-4, lr_d=2e-4, l1=10.0):
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.gen, self.judge = Downscaler(fields), Judge(fields)

    def configure_optimizers(self):
        g = torch.optim.Adam(self.gen.parameters(), self.hparams.lr_g, betas=(0.0, 0.99))
        d = torch.optim.Adam(self.judge.parameters(), self.hparams.lr_d, betas=(0.0, 0.99))
        return g, d

    def training_step(self, batch, batch_idx):
        coarse, fine = batch
        opt_g, opt_d = self.optimizers()

        self.toggle_optimizer(opt_d)
        fake = self.gen(coarse).detach()
        d_loss = F.relu(1 - self.judge(fine).float()).mean() + F.relu(1 + self.judge(fake).float()).mean()
        opt_d.zero_grad()
        self.manual_backward(d_loss)
        self.clip_gradients(opt_d, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_d.step()
        self.untoggle_optimizer(opt_d)

        self.toggle_optimizer(opt_g)
        fake = self.gen(coarse)
        g_loss = self.hparams.l1 * F.l1_loss(fake.float(), fine) - self.judge(fake).float().mean()
        opt_g.zero_grad()
        self.manual_backward(g_loss)
        self.clip_gradients(opt_g, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        opt_g.step()
        self.untoggle_optimizer(opt_g)
        self.log_dict({"d": d_loss.detach(), "g": g_loss.detach()}, prog_bar=True)


def launch(datamodule):
    trainer = L.Trainer(accelerator="gpu", devices=1, precision="bf16-mixed", max_epochs=100)
    trainer.fit(DownscalingGAN(), datamodule=datamodule)
