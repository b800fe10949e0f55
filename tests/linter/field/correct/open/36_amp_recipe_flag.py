# style of: pytorch/tutorials:recipes_source/recipes/amp_recipe.py
# torch: 2.3+
import time

import torch

device = "cuda"


def make_model(in_size, out_size, num_layers):
    layers = []
    for _ in range(num_layers - 1):
        layers += [torch.nn.Linear(in_size, in_size), torch.nn.ReLU()]
    layers.append(torch.nn.Linear(in_size, out_size))
    return torch.nn.Sequential(*layers).to(device)


batch_size, in_size, out_size, num_layers, num_batches, epochs = 512, 4096, 4096, 3, 50, 3
data = [torch.randn(batch_size, in_size, device=device) for _ in range(num_batches)]
targets = [torch.randn(batch_size, out_size, device=device) for _ in range(num_batches)]
loss_fn = torch.nn.MSELoss().to(device)

# one switch: with False, the same code runs in default precision
use_amp = True
net = make_model(in_size, out_size, num_layers)
opt = torch.optim.SGD(net.parameters(), lr=0.001)
scaler = torch.amp.GradScaler("cuda", enabled=use_amp)

torch.cuda.synchronize()
start = time.time()
for epoch in range(epochs):
    for inputs, target in zip(data, targets):
        with torch.autocast(device_type=device, dtype=torch.float16, enabled=use_amp):
            output = net(inputs)
            # linear layers autocast to float16, mse_loss to float32
            assert output.dtype is (torch.float16 if use_amp else torch.float32)
            loss = loss_fn(output, target)
            assert loss.dtype is torch.float32
        scaler.scale(loss).backward()

        # the gradients are inspected between backward and step: unscale them first
        scaler.unscale_(opt)
        torch.nn.utils.clip_grad_norm_(net.parameters(), max_norm=0.1)
        scaler.step(opt)
        scaler.update()
        opt.zero_grad()
torch.cuda.synchronize()
print(f"took {time.time() - start:.3f} s")

# checkpoint at the end of an iteration, after scaler.update()
checkpoint = {"model": net.state_dict(), "optimizer": opt.state_dict(), "scaler": scaler.state_dict()}
torch.save(checkpoint, "recipe.pt")

dev = torch.cuda.current_device()
checkpoint = torch.load("recipe.pt", map_location=lambda storage, loc: storage.cuda(dev))
net.load_state_dict(checkpoint["model"])
opt.load_state_dict(checkpoint["optimizer"])
scaler.load_state_dict(checkpoint["scaler"])

# inference: autocast alone
net.eval()
with torch.no_grad(), torch.autocast(device_type=device, dtype=torch.float16, enabled=use_amp):
    print(loss_fn(net(data[0]), targets[0]).item())
