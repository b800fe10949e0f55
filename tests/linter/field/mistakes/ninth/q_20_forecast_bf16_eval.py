# source: https://github.com/Nixtla/neuralforecast/issues/1259
# mistake: the forecasts made under bfloat16 autocast are turned into numpy directly, which raises since numpy has no bfloat16
# severity: error
import numpy as np
import torch
import torch.nn as nn


class Mixer(nn.Module):
    def __init__(self, series, past, horizon, width=256, depth=4, drop=0.1):
        super().__init__()
        self.time = nn.ModuleList(nn.Sequential(nn.Linear(past, past), nn.GELU(), nn.Dropout(drop)) for _ in range(depth))
        self.feat = nn.ModuleList(
            nn.Sequential(nn.Linear(series, width), nn.GELU(), nn.Linear(width, series)) for _ in range(depth))
        self.out = nn.Linear(past, horizon)

    def forward(self, x):
        for t, f in zip(self.time, self.feat):
            x = x + t(x.transpose(1, 2)).transpose(1, 2)
            x = x + f(x)
        return self.out(x.transpose(1, 2)).transpose(1, 2)


def windows(values, past, horizon, batch, rng):
    while True:
        at = rng.integers(0, len(values) - past - horizon, size=batch)
        x = np.stack([values[i:i + past] for i in at])
        y = np.stack([values[i + past:i + past + horizon] for i in at])
        yield torch.from_numpy(x).float(), torch.from_numpy(y).float()


def smape(y, p):
    return float(200 * np.mean(np.abs(y - p) / (np.abs(y) + np.abs(p) + 1e-6)))


def backtest(model, values, past, horizon, device):
    model.eval()
    preds, actual = [], []
    with torch.inference_mode():
        for i in range(0, len(values) - past - horizon, horizon):
            x = torch.from_numpy(values[None, i:i + past]).float().to(device)
            with torch.autocast("cuda", dtype=torch.bfloat16):
                forecast = model(x)
            preds.append(forecast.squeeze(0).cpu().numpy())  # <- here
            actual.append(values[i + past:i + past + horizon])
    return smape(np.concatenate(actual), np.concatenate(preds))


def main(train_values, test_values, past=336, horizon=96, steps=5000):
    device = torch.device("cuda")
    rng = np.random.default_rng(1)
    model = Mixer(train_values.shape[1], past, horizon).to(device)
    opt = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, max_lr=1e-3, total_steps=steps)
    stream = windows(train_values, past, horizon, 64, rng)
    for step in range(steps):
        model.train()
        x, y = (t.to(device) for t in next(stream))
        with torch.autocast("cuda", dtype=torch.bfloat16):
            pred = model(x)
        loss = nn.functional.huber_loss(pred.float(), y)
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        sched.step()
        if (step + 1) % 1000 == 0:
            print(step + 1, loss.item(), backtest(model, test_values, past, horizon, device))
