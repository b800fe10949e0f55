# source: https://github.com/maxencewynen/ConfLUNet/pull/16
# mistake: the scaler's state is written into the checkpoint but never read back on resume.
# severity: warning
# torch: any
from pathlib import Path

import torch


class LesionTrainer:
    def __init__(self, network, loss, train_loader, out_dir, num_epochs=1000):
        self.device = torch.device("cuda")
        self.network = network.to(self.device)
        self.loss = loss
        self.loader = train_loader
        self.out_dir = Path(out_dir)
        self.num_epochs = num_epochs
        self.current_epoch = 0
        self.optimizer = torch.optim.SGD(self.network.parameters(), lr=1e-2, momentum=0.99, nesterov=True)
        self.lr_scheduler = torch.optim.lr_scheduler.PolynomialLR(self.optimizer, num_epochs, 0.9)
        self.grad_scaler = torch.amp.GradScaler("cuda")

    def save_checkpoint(self, name="latest.pt"):
        torch.save(
            {
                "epoch": self.current_epoch,
                "network": self.network.state_dict(),
                "optimizer": self.optimizer.state_dict(),
                "lr_scheduler": self.lr_scheduler.state_dict(),
                "scaler": self.grad_scaler.state_dict(),
            },
            self.out_dir / name,
        )

    def load_checkpoint(self, name="latest.pt"):  # <- here
        ckpt = torch.load(self.out_dir / name, map_location=self.device, weights_only=True)
        self.network.load_state_dict(ckpt["network"])
        self.optimizer.load_state_dict(ckpt["optimizer"])  # <- here
        self.lr_scheduler.load_state_dict(ckpt["lr_scheduler"])
        self.current_epoch = ckpt["epoch"] + 1

    def run(self, resume=False):
        if resume:
            self.load_checkpoint()
        for self.current_epoch in range(self.current_epoch, self.num_epochs):
            self.network.train()
            for batch in self.loader:
                x, y = batch["img"].to(self.device), batch["seg"].to(self.device)
                self.optimizer.zero_grad(set_to_none=True)
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = self.loss(self.network(x), y)
                self.grad_scaler.scale(loss).backward()
                self.grad_scaler.unscale_(self.optimizer)
                torch.nn.utils.clip_grad_norm_(self.network.parameters(), 12)
                self.grad_scaler.step(self.optimizer)
                self.grad_scaler.update()
            self.lr_scheduler.step()
            self.save_checkpoint()
