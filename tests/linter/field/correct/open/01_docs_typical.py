# style of: https://docs.pytorch.org/docs/stable/_sources/notes/amp_examples.rst.txt (typical mixed precision training)
# torch: 2.3+
import torch
from torch import nn

torch.manual_seed(0)
net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 10)).cuda()
sgd = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
criterion = nn.CrossEntropyLoss()

# one scaler for the whole run
scaler = torch.amp.GradScaler("cuda")

batches = [
    (torch.randn(32, 64, device="cuda"), torch.randint(0, 10, (32,), device="cuda"))
    for _ in range(50)
]

for epoch in range(5):
    running = 0.0
    for features, target in batches:
        sgd.zero_grad()
        # only the forward pass and the loss run under autocast
        with torch.autocast(device_type="cuda", dtype=torch.float16):
            logits = net(features)
            loss = criterion(logits, target)
        # backward runs outside, on the scaled loss
        scaler.scale(loss).backward()
        scaler.step(sgd)
        scaler.update()
        running += loss.item()
    print(f"epoch {epoch}: loss {running / len(batches):.4f}, scale {scaler.get_scale():.0f}")
