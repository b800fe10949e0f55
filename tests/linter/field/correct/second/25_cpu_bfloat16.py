"""
# style of: intel/intel-extension-for-pytorch:examples/cpu/training
# correct: CPU autocast in bfloat16, which has the range of float32: no scaler, plain backward, clip and step.
# torch: 1.12+
"""
import argparse
import time

import torch
import torchvision
from torch import nn

LR = 0.001


def get_loader(root, batch_size):
    transform = torchvision.transforms.Compose(
        [
            torchvision.transforms.Resize((224, 224)),
            torchvision.transforms.ToTensor(),
            torchvision.transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5)),
        ]
    )
    dataset = torchvision.datasets.CIFAR10(root=root, train=True, transform=transform, download=True)
    return torch.utils.data.DataLoader(dataset=dataset, batch_size=batch_size, shuffle=True)


def train_epoch(model, loader, criterion, optimizer, max_norm, use_bf16):
    model.train()
    start, seen = time.time(), 0
    for batch_idx, (data, target) in enumerate(loader):
        data = data.to(memory_format=torch.channels_last)
        optimizer.zero_grad()
        with torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=use_bf16):
            output = model(data)
            loss = criterion(output, target)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)
        optimizer.step()
        seen += len(target)
        if batch_idx % 20 == 0:
            print(f"{batch_idx}: loss {loss.item():.4f} {seen / (time.time() - start):.1f} img/s")


@torch.inference_mode()
def accuracy(model, loader, use_bf16, batches=10):
    model.eval()
    hits = total = 0
    with torch.autocast(device_type="cpu", dtype=torch.bfloat16, enabled=use_bf16):
        for (data, target), _ in zip(loader, range(batches)):
            hits += (model(data.to(memory_format=torch.channels_last)).argmax(1) == target).sum().item()
            total += len(target)
    return hits / total


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--root", default="datasets/cifar10")
    parser.add_argument("--batch-size", type=int, default=128)
    parser.add_argument("--epochs", type=int, default=1)
    parser.add_argument("--max-norm", type=float, default=5.0)
    parser.add_argument("--no-bf16", action="store_true")
    args = parser.parse_args()

    model = torchvision.models.resnet50(weights=None, num_classes=10).to(memory_format=torch.channels_last)
    optimizer = torch.optim.SGD(model.parameters(), lr=LR, momentum=0.9)
    loader = get_loader(args.root, args.batch_size)
    for epoch in range(args.epochs):
        train_epoch(model, loader, nn.CrossEntropyLoss(), optimizer, args.max_norm, not args.no_bf16)
        print(f"epoch {epoch}: accuracy {accuracy(model, loader, not args.no_bf16):.3f}")
    torch.save({"model_state_dict": model.state_dict(), "optimizer_state_dict": optimizer.state_dict()}, "ckpt.pth")


if __name__ == "__main__":
    main()
