# source: https://github.com/IAHispano/Applio/pull/860
# mistake: besides scaler.step() the optimizer's own step() is called, so each update is applied twice and non-finite gradients are applied too
# severity: error
import pandas as pd
import torch
from torch import nn
from torch.utils.data import DataLoader, Dataset


class Windows(Dataset):
    def __init__(self, csv, history=168, horizon=24):
        frame = pd.read_csv(csv, parse_dates=["time"]).set_index("time")
        series = torch.tensor(frame["load"].values, dtype=torch.float32)
        self.series = (series - series.mean()) / series.std()
        self.history, self.horizon = history, horizon

    def __len__(self):
        return len(self.series) - self.history - self.horizon

    def __getitem__(self, i):
        mid = i + self.history
        return self.series[i:mid], self.series[mid:mid + self.horizon]


class Forecaster(nn.Module):
    def __init__(self, horizon=24, hidden=256):
        super().__init__()
        self.rnn = nn.GRU(1, hidden, num_layers=2, batch_first=True, dropout=0.1)
        self.out = nn.Linear(hidden, horizon)

    def forward(self, x):
        states, _ = self.rnn(x.unsqueeze(-1))
        return self.out(states[:, -1])


def run_epoch(model, loader, criterion, optimizer, scaler, scheduler):
    model.train()
    running = 0.0
    for past, future in loader:
        past, future = past.cuda(), future.cuda()
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():
            forecast = model(past)
            loss = criterion(forecast, future)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        running += loss.item()
        optimizer.step()  # <- here
    scheduler.step()
    return running / len(loader)


def main():
    loader = DataLoader(Windows("load_hourly.csv"), batch_size=256, shuffle=True, num_workers=4, drop_last=True)
    model = Forecaster().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-4, weight_decay=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=40)
    scaler = torch.cuda.amp.GradScaler()
    for epoch in range(40):
        mae = run_epoch(model, loader, nn.L1Loss(), optimizer, scaler, scheduler)
        print(f"{epoch:02d}  mae {mae:.4f}  lr {scheduler.get_last_lr()[0]:.2e}")
    torch.save(model.state_dict(), "forecaster.pt")


if __name__ == "__main__":
    main()
