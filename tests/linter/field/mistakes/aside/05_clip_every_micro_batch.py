# source: https://github.com/Deci-AI/super-gradients/pull/653
# mistake: the running sum of scaled gradients is clipped after every micro batch instead of once, unscaled, before the step.
# severity: error
# torch: any
import torch
from torch import nn


class SgTrainer:
    def __init__(self, net, optimizer, criterion, training_params):
        self.net = net
        self.optimizer = optimizer
        self.criterion = criterion
        self.p = training_params
        self.scaler = torch.amp.GradScaler("cuda", enabled=self.p["mixed_precision"])

    def _backward_step(self, loss, batch_idx, n_batches):
        accumulate = self.p["batch_accumulate"]
        self.scaler.scale(loss / accumulate).backward()
        if self.p["clip_grad_norm"]:
            nn.utils.clip_grad_norm_(self.net.parameters(), self.p["clip_grad_norm"])  # <- here
        if (batch_idx + 1) % accumulate == 0 or batch_idx + 1 == n_batches:
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()

    def _train_epoch(self, loader):
        self.net.train()
        for batch_idx, (images, targets) in enumerate(loader):
            images = images.cuda(non_blocking=True)
            targets = targets.cuda(non_blocking=True)
            with torch.autocast("cuda", dtype=torch.float16, enabled=self.p["mixed_precision"]):
                outputs = self.net(images)
                loss = self.criterion(outputs, targets)
            self._backward_step(loss, batch_idx, len(loader))

    def fit(self, loader):
        for epoch in range(self.p["max_epochs"]):
            self._train_epoch(loader)


if __name__ == "__main__":
    import torchvision

    model = torchvision.models.resnet18(num_classes=10).cuda()
    sgd = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    data = torchvision.datasets.FakeData(512, transform=torchvision.transforms.ToTensor(), num_classes=10)
    params = dict(mixed_precision=True, batch_accumulate=4, clip_grad_norm=1.0, max_epochs=2)
    SgTrainer(model, sgd, nn.CrossEntropyLoss(), params).fit(torch.utils.data.DataLoader(data, batch_size=16))
