import torch
from torch import nn

model = nn.Linear(16, 3)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for _ in range(3):
    loss = model(torch.randn(4, 16)).square().mean()
    loss.backward()
    optimizer.step()
