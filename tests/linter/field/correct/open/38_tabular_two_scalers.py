# style of: HerronYang/BBG_Capstone:LSTM/config.py
# torch: 2.3+
import joblib
import numpy as np
import torch
from sklearn.metrics import mean_squared_error
from sklearn.preprocessing import StandardScaler
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

WINDOW = 24
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


class PriceLSTM(nn.Module):
    def __init__(self, features, hidden=64):
        super().__init__()
        self.rnn = nn.LSTM(features, hidden, batch_first=True)
        self.head = nn.Linear(hidden, 1)

    def forward(self, x):
        out, _ = self.rnn(x)
        return self.head(out[:, -1])


def windows(values):
    x = np.stack([values[i : i + WINDOW] for i in range(len(values) - WINDOW)])
    return torch.tensor(x, dtype=torch.float32), torch.tensor(values[WINDOW:, :1], dtype=torch.float32)


def main(series):
    split = int(len(series) * 0.8)
    scaler = StandardScaler()  # of the data
    train_values = scaler.fit_transform(series[:split])
    test_values = scaler.transform(series[split:])
    joblib.dump(scaler, "scaler.pkl")

    x_train, y_train = windows(train_values)
    x_test, y_test = windows(test_values)
    loader = DataLoader(TensorDataset(x_train, y_train), batch_size=64, shuffle=True)

    model = PriceLSTM(series.shape[1]).to(DEVICE)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    criterion = nn.MSELoss()
    grad_scaler = torch.amp.GradScaler("cuda", enabled=DEVICE == "cuda")  # of the loss

    for epoch in range(20):
        model.train()
        for xb, yb in loader:
            xb, yb = xb.to(DEVICE), yb.to(DEVICE)
            optimizer.zero_grad()
            with torch.autocast(DEVICE, dtype=torch.float16, enabled=DEVICE == "cuda"):
                loss = criterion(model(xb), yb)
            grad_scaler.scale(loss).backward()
            grad_scaler.step(optimizer)
            grad_scaler.update()

    model.eval()
    with torch.no_grad():
        pred = model(x_test.to(DEVICE)).float().cpu().numpy()
    # undo the standardisation of the target column only
    restore = lambda v: v * np.sqrt(scaler.var_[0]) + scaler.mean_[0]
    return mean_squared_error(restore(y_test.numpy()), restore(pred))


if __name__ == "__main__":
    rng = np.random.default_rng(0)
    print(main(rng.standard_normal((2000, 4)).cumsum(axis=0)))
