# source: https://github.com/intel/intel-extension-for-pytorch/issues/814
# mistake: training runs on "xpu" in float16, but GradScaler() defaults to device "cuda" and switches itself off where there is no CUDA, so there is no loss scaling.
# severity: error
# torch: any with GradScaler(device="cuda") as default (2.3 to 2.13)
import argparse

import torch
import torchvision

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, default=1e-3)
parser.add_argument("--epochs", type=int, default=1)
parser.add_argument("--no-amp", dest="use_amp", action="store_false")
opt = parser.parse_args()

DEVICE = "xpu"

transform = torchvision.transforms.Compose(
    [
        torchvision.transforms.Resize((224, 224)),
        torchvision.transforms.ToTensor(),
        torchvision.transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
    ]
)
train_dataset = torchvision.datasets.CIFAR10(root="datasets/cifar10", train=True, transform=transform, download=True)
train_loader = torch.utils.data.DataLoader(train_dataset, batch_size=128, shuffle=True)

model = torchvision.models.resnet50(num_classes=10).to(DEVICE)
criterion = torch.nn.CrossEntropyLoss().to(DEVICE)
optimizer = torch.optim.SGD(model.parameters(), lr=opt.lr, momentum=0.9)
scaler = torch.amp.GradScaler(enabled=opt.use_amp)  # <- here

model.train()
for epoch in range(opt.epochs):
    for batch_idx, (data, target) in enumerate(train_loader):
        data, target = data.to(DEVICE), target.to(DEVICE)
        with torch.autocast(device_type=DEVICE, dtype=torch.float16, enabled=opt.use_amp):
            output = model(data)
            loss = criterion(output, target)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        if (batch_idx + 1) % 10 == 0:
            print(f"Iteration [{batch_idx + 1}/{len(train_loader)}], Loss: {loss.item():.4f}")

torch.save({"model_state_dict": model.state_dict()}, "resnet50_cifar10.pth")
