# style of: Lightning-AI/pytorch-lightning:examples/fabric/image_classifier/train_fabric.py
# torch: 2.1+
import argparse

import lightning as L
import torch
from torch import nn
import torch.nn.functional as F
from torch.utils.data import DataLoader, TensorDataset


def build_model():
    return nn.Sequential(
        nn.Conv2d(1, 16, 3), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten(), nn.Linear(16 * 13 * 13, 10)
    )


def run(hparams):
    fabric = L.Fabric(accelerator="cuda", devices=1, precision=hparams.precision)
    fabric.launch()
    fabric.seed_everything(hparams.seed)

    train = TensorDataset(torch.rand(2048, 1, 28, 28), torch.randint(0, 10, (2048,)))
    valid = TensorDataset(torch.rand(512, 1, 28, 28), torch.randint(0, 10, (512,)))
    train_loader = fabric.setup_dataloaders(DataLoader(train, batch_size=64, shuffle=True))
    valid_loader = fabric.setup_dataloaders(DataLoader(valid, batch_size=256))

    model = build_model()
    optimizer = torch.optim.Adadelta(model.parameters(), lr=hparams.lr)
    model, optimizer = fabric.setup(model, optimizer)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.7)

    for epoch in range(hparams.epochs):
        model.train()
        for data, target in train_loader:
            optimizer.zero_grad()
            # autocast is applied by the wrapped forward; the output comes back in float32
            loss = F.cross_entropy(model(data), target)
            fabric.backward(loss)
            # unscales first when the precision is 16-mixed
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
        scheduler.step()

        model.eval()
        correct = torch.zeros((), device=fabric.device)
        with torch.no_grad():
            for data, target in valid_loader:
                correct += (model(data).argmax(1) == target).sum()
        fabric.print(f"epoch {epoch}: accuracy {correct.item() / len(valid):.3f}")

    # weights for inference only
    fabric.save("classifier.ckpt", {"model": model})


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--precision", default="16-mixed", choices=["16-mixed", "bf16-mixed", "32-true"])
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--lr", type=float, default=1.0)
    parser.add_argument("--seed", type=int, default=1)
    run(parser.parse_args())
