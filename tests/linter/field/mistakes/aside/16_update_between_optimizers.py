# source: https://github.com/huggingface/accelerate/issues/439
# mistake: both losses were scaled with the same factor, but update() runs after the first step, so whenever the scale changes the second optimizer is unscaled with the wrong factor.
# severity: warning
# torch: any
import torch
from torch import nn


def make_mlp(sizes):
    layers = []
    for a, b in zip(sizes, sizes[1:]):
        layers += [nn.Linear(a, b), nn.GELU()]
    return nn.Sequential(*layers[:-1])


def train(loader, epochs=10, device="cuda"):
    model0 = make_mlp([64, 256, 256, 1]).to(device)
    model1 = make_mlp([64, 512, 1]).to(device)
    optim0 = torch.optim.Adam(model0.parameters(), lr=1e-3)
    optim1 = torch.optim.Adam(model1.parameters(), lr=3e-4)
    scaler = torch.amp.GradScaler(device)
    criterion = nn.SmoothL1Loss()

    for epoch in range(epochs):
        for x, y in loader:
            x, y = x.to(device), y.to(device)
            optim0.zero_grad()
            optim1.zero_grad()
            with torch.autocast(device_type=device, dtype=torch.float16):
                loss0 = criterion(model0(x), y)
                loss1 = criterion(model1(x), y)

            scaler.scale(loss0).backward()
            scaler.scale(loss1).backward()

            scaler.step(optim0)
            scaler.update()  # <- here
            scaler.step(optim1)
            scaler.update()
        print(epoch, loss0.item(), loss1.item())
    return model0, model1


if __name__ == "__main__":
    xs = torch.randn(4096, 64)
    ys = xs.sum(dim=1, keepdim=True).sin()
    ds = torch.utils.data.TensorDataset(xs, ys)
    train(torch.utils.data.DataLoader(ds, batch_size=128, shuffle=True))
