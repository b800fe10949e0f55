# why correct: training keeps float32 weights under autocast; only a deep copy made for serving is cast to float16, and its inputs are integer ids
import copy
import time

import torch
from torch import nn
from torch.cuda.amp import GradScaler, autocast
from torch.nn import functional as F


class ItemCNN(nn.Module):
    def __init__(self, n_items, dim=128, widths=(2, 3, 4, 5), maps=64):
        super().__init__()
        self.items = nn.Embedding(n_items, dim, padding_idx=0)
        self.convs = nn.ModuleList(nn.Conv1d(dim, maps, w, padding=w - 1) for w in widths)
        self.drop = nn.Dropout(0.3)
        self.mix = nn.Linear(maps * len(widths), dim)

    def encode(self, history):
        x = self.items(history).transpose(1, 2)
        pooled = [conv(x).relu().amax(-1) for conv in self.convs]
        return self.mix(self.drop(torch.cat(pooled, 1)))

    def forward(self, history):
        return self.encode(history) @ self.items.weight.t()


class Serving:
    def __init__(self, model):
        self.net = copy.deepcopy(model).eval().half().requires_grad_(False)

    @torch.inference_mode()
    def top(self, history, k=20):
        scores = self.net(history).float()
        scores.scatter_(1, history, float("-inf"))
        return scores.topk(k).indices


def hit_rate(serving, loader):
    hits = n = 0
    for history, target in loader:
        top = serving.top(history.cuda())
        hits += (top == target.cuda()[:, None]).any(1).sum().item()
        n += target.numel()
    return hits / n


def train(train_loader, val_loader, n_items, epochs=12):
    model = ItemCNN(n_items).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    scaler = GradScaler()
    for epoch in range(epochs):
        model.train()
        began = time.time()
        for history, target in train_loader:
            optimizer.zero_grad(set_to_none=True)
            with autocast():
                loss = F.cross_entropy(model(history.cuda()), target.cuda())
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        serving = Serving(model)
        print(epoch, f"hit@20 {hit_rate(serving, val_loader):.4f} in {time.time() - began:.0f}s")
    torch.save(serving.net.state_dict(), "serving-fp16.pt")
    torch.save(model.state_dict(), "weights-fp32.pt")
    return model
