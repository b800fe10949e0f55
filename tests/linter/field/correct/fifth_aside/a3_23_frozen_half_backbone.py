# why correct: only the frozen backbone is float16 and it is outside the optimizer; the trained head is float32, so the scaler never meets a float16 gradient
import torch
import torch.nn as nn
import torch.nn.functional as F
from transformers import AutoModel, AutoTokenizer


def frozen_backbone(name):
    net = AutoModel.from_pretrained(name, torch_dtype=torch.float16)
    net.requires_grad_(False)
    return net.eval().cuda()


class Head(nn.Module):
    def __init__(self, dim, classes):
        super().__init__()
        self.pool = nn.Linear(dim, 1)
        self.net = nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, dim), nn.GELU(), nn.Dropout(0.1), nn.Linear(dim, classes))

    def forward(self, states, keep):
        gate = self.pool(states).squeeze(-1).float().masked_fill(~keep, -1e9).softmax(-1)
        pooled = torch.einsum("bt,btd->bd", gate, states)
        return self.net(pooled)


class ReviewTagger:
    def __init__(self, name="distilroberta-base", classes=40, lr=1e-3, micro=4):
        self.tokenizer = AutoTokenizer.from_pretrained(name)
        self.backbone = frozen_backbone(name)
        self.head = Head(self.backbone.config.hidden_size, classes).cuda()
        self.optimizer = torch.optim.AdamW(self.head.parameters(), lr=lr)
        self.scaler = torch.amp.GradScaler("cuda")
        self.micro = micro

    def encode(self, texts):
        batch = self.tokenizer(texts, padding=True, truncation=True, max_length=256, return_tensors="pt").to("cuda")
        with torch.no_grad():
            states = self.backbone(**batch).last_hidden_state
        return states, batch["attention_mask"].bool()

    def loss(self, texts, tags):
        states, keep = self.encode(texts)
        with torch.autocast("cuda", dtype=torch.float16):
            logits = self.head(states, keep)
            return F.binary_cross_entropy_with_logits(logits, tags.cuda())

    def train(self, loader, epochs):
        for epoch in range(epochs):
            pending, total = 0, 0.0
            last = len(loader) - 1
            for i, (texts, tags) in enumerate(loader):
                value = self.loss(list(texts), tags)
                self.scaler.scale(value / self.micro).backward()
                pending += 1
                total += value.item()
                if pending == self.micro or i == last:
                    if pending < self.micro:
                        self.rescale(self.micro / pending)
                    self.scaler.step(self.optimizer)
                    self.scaler.update()
                    self.optimizer.zero_grad(set_to_none=True)
                    pending = 0
            print(epoch, total / len(loader))

    def rescale(self, factor):
        for p in self.head.parameters():
            if p.grad is not None:
                p.grad.mul_(factor)
