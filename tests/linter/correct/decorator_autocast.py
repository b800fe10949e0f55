import torch
from torch import nn


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(8, 8)

    @torch.autocast("cuda", dtype=torch.float16)
    def forward(self, x):
        return self.layer(x)


def train(loader, criterion):
    model = nn.DataParallel(Net().cuda())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        optimizer.zero_grad()
        out = model(x)
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(out, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
