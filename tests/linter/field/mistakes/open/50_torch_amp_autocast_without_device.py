# source: https://github.com/NVIDIA/physicsnemo/pull/1946
# mistake: the import was changed from torch.cuda.amp to torch.amp, but autocast is still called without a device type, which raises TypeError.
# severity: error
# torch: any
import torch
from torch.amp import GradScaler, autocast


class GraphWeatherTrainer:
    def __init__(self, cfg, model, criterion):
        self.cfg = cfg
        self.model = model.to("cuda")
        self.criterion = criterion
        self.amp_dtype = torch.bfloat16 if cfg.amp_dtype == "bfloat16" else torch.float16
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=cfg.lr, betas=(0.9, 0.95), weight_decay=0.1)
        self.scaler = GradScaler("cuda", enabled=cfg.amp and self.amp_dtype is torch.float16)

    def rollout(self, grid_nfeat, y):
        with autocast(enabled=self.cfg.amp, dtype=self.amp_dtype):  # <- here
            total = 0.0
            state = grid_nfeat
            for step in range(y.shape[1]):
                state = self.model(state)
                total = total + self.criterion(state, y[:, step])
            return total / y.shape[1]

    def forward(self, grid_nfeat, y):
        self.optimizer.zero_grad()
        return self.rollout(grid_nfeat, y)

    def backward(self, loss):
        self.scaler.scale(loss).backward()
        self.scaler.unscale_(self.optimizer)
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.cfg.grad_clip_norm)
        self.scaler.step(self.optimizer)
        self.scaler.update()

    def train(self, grid_nfeat, y):
        self.model.train()
        loss = self.forward(grid_nfeat.to("cuda"), y.to("cuda"))
        self.backward(loss)
        return loss.detach().item()


def main(cfg, model, loader):
    trainer = GraphWeatherTrainer(cfg, model, torch.nn.MSELoss())
    for epoch in range(cfg.epochs):
        for invar, outvar in loader:
            value = trainer.train(invar, outvar)
        print(f"epoch {epoch} loss {value:.5f}")
