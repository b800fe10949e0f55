# why correct: bfloat16 autocast over float32 weights needs no loss scale, so plain backward, clipping and step are right; the loss and the running sums are float32
import json
import sys

import torch
from torch import nn

CONFIG = {
    "hidden": 256,
    "layers": 2,
    "dropout": 0.2,
    "lr": 5e-4,
    "epochs": 30,
    "clip": 1.0,
    "precision": "bfloat16",
    "compile": True,
}


class Streamflow(nn.Module):
    def __init__(self, forcings, statics, cfg):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(forcings + statics, cfg["hidden"]), nn.ReLU())
        self.mixer = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(cfg["hidden"]), nn.Linear(cfg["hidden"], 2 * cfg["hidden"]), nn.GELU(),
                          nn.Dropout(cfg["dropout"]), nn.Linear(2 * cfg["hidden"], cfg["hidden"]))
            for _ in range(cfg["layers"])
        )
        self.time = nn.ModuleList(nn.Linear(365, 365) for _ in range(cfg["layers"]))
        self.head = nn.Linear(cfg["hidden"], 1)

    def forward(self, forcing, static):
        x = torch.cat([forcing, static[:, None].expand(-1, forcing.shape[1], -1)], dim=-1)
        h = self.embed(x)
        for mixer, time in zip(self.mixer, self.time):
            h = h + mixer(h)
            h = h + time(h.transpose(1, 2)).transpose(1, 2)
        return self.head(h[:, -1]).squeeze(-1)


def nse_loss(guess, flow, basin_std, eps=0.1):
    weight = 1 / (basin_std.float() + eps) ** 2
    return (weight * (guess.float() - flow.float()) ** 2).mean()


def run(loader, forcings, statics, cfg=CONFIG):
    dtype = getattr(torch, cfg["precision"])
    model = Streamflow(forcings, statics, cfg).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=cfg["lr"])
    step = torch.compile(model) if cfg["compile"] else model
    for epoch in range(cfg["epochs"]):
        model.train()
        loss_sum = torch.zeros((), device="cuda")
        batches = 0
        for forcing, static, flow, std in loader:
            forcing, static, flow, std = (t.cuda(non_blocking=True) for t in (forcing, static, flow, std))
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=dtype):
                guess = step(forcing, static)
            loss = nse_loss(guess, flow, std)
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), cfg["clip"])
            optimizer.step()
            loss_sum += loss.detach()
            batches += 1
        print(json.dumps({"epoch": epoch, "loss": loss_sum.item() / batches}), file=sys.stderr)
    torch.save(model.state_dict(), "streamflow.pt")
    return model
