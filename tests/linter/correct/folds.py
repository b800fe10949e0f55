import torch
from torchvision.models import resnet18


def cross_validate(folds, criterion, epochs):
    for train_loader, test_loader in folds:
        model = resnet18().cuda()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scaler = torch.amp.GradScaler("cuda")
        for epoch in range(epochs):
            for x, y in train_loader:
                optimizer.zero_grad()
                with torch.autocast("cuda", dtype=torch.float16):
                    loss = criterion(model(x), y)
                scaler.scale(loss).backward()
                scaler.step(optimizer)
                scaler.update()
            with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
                for x, y in test_loader:
                    criterion(model(x), y)
