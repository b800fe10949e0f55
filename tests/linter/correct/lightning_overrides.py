import lightning.pytorch as pl
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_


class Model(pl.LightningModule):
    def __init__(self, net):
        super().__init__()
        self.net = net

    def training_step(self, batch, batch_idx):
        x, y = batch
        with torch.autocast("cuda", enabled=False):
            loss = F.mse_loss(self.net(x.float()), y.float())
        if batch_idx % 50 == 0:
            self.log("loss", loss.item())
        return loss

    def on_before_optimizer_step(self, optimizer):
        norms = {name: p.grad.norm() for name, p in self.named_parameters() if p.grad is not None}
        self.log_dict(norms)

    def configure_gradient_clipping(self, optimizer, gradient_clip_val=None, gradient_clip_algorithm=None):
        clip_grad_norm_(self.parameters(), 1.0)

    def optimizer_step(self, epoch, batch_idx, optimizer, optimizer_closure):
        optimizer.step(closure=optimizer_closure)

    def lr_scheduler_step(self, scheduler, metric):
        scheduler.step()

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), eps=1e-8)
