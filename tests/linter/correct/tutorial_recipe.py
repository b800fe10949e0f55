import torch
from torch import nn


def make_model(in_size, out_size, num_layers):
    layers = []
    for _ in range(num_layers - 1):
        layers.append(nn.Linear(in_size, in_size))
        layers.append(nn.ReLU())
    layers.append(nn.Linear(in_size, out_size))
    return nn.Sequential(*layers).cuda()


net = make_model(256, 10, 3)
opt = torch.optim.SGD(net.parameters(), lr=0.001)
loss_fn = nn.MSELoss().cuda()
use_amp = True
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)
data = [torch.randn(64, 256) for _ in range(50)]
targets = [torch.randn(64, 10) for _ in range(50)]

for epoch in range(3):
    for input, target in zip(data, targets):
        with torch.autocast(device_type="cuda", dtype=torch.float16, enabled=use_amp):
            output = net(input)
            loss = loss_fn(output, target)
        scaler.scale(loss).backward()
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()

checkpoint = {"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}
torch.save(checkpoint, "filename")
dev = torch.cuda.current_device()
checkpoint = torch.load("filename", map_location=lambda storage, loc: storage.cuda(dev))
net.load_state_dict(checkpoint["model"])
opt.load_state_dict(checkpoint["optimizer"])
scaler.load_state_dict(checkpoint["scaler"])
