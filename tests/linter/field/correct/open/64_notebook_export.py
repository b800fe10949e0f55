# style of: shigengtian/kaggle-Feedback-Prize3:exp042-fb3-deberta-v3-base_unscale.py
# torch: 1.10+
# coding: utf-8

# %% [markdown]
# # Essay scoring: DeBERTa with attention pooling

# In[1]:
import math

import numpy as np
import torch
import torch.nn as nn
from torch.utils.data import DataLoader
from tqdm.auto import tqdm
from transformers import AutoModel, get_cosine_schedule_with_warmup


# In[2]:
class CFG:
    apex = True  # mixed precision, whatever the name says
    model = "microsoft/deberta-v3-base"
    epochs = 4
    batch_size = 8
    lr = 2e-5
    eps = 1e-6
    gradient_accumulation_steps = 2
    max_grad_norm = 1000
    batch_scheduler = True


device = torch.device("cuda" if torch.cuda.is_available() else "cpu")


# In[3]:
class Scorer(nn.Module):
    def __init__(self):
        super().__init__()
        self.backbone = AutoModel.from_pretrained(CFG.model)
        width = self.backbone.config.hidden_size
        self.attention = nn.Sequential(nn.Linear(width, 512), nn.Tanh(), nn.Linear(512, 1))
        self.fc = nn.Linear(width, 6)

    def forward(self, inputs):
        hidden = self.backbone(**inputs)[0]
        score = self.attention(hidden).float()
        score = score.masked_fill(inputs["attention_mask"].unsqueeze(-1) == 0, -1e9)
        weights = torch.softmax(score, dim=1)
        return self.fc((weights * hidden).sum(dim=1))


# In[4]:
def train_fn(train_loader, model, criterion, optimizer, epoch, scheduler, scaler):
    model.train()
    losses = []
    last = len(train_loader) - 1
    tail = len(train_loader) % CFG.gradient_accumulation_steps
    for step, (inputs, labels) in enumerate(tqdm(train_loader)):
        inputs = {k: v.to(device) for k, v in inputs.items()}
        labels = labels.to(device)
        with torch.cuda.amp.autocast(enabled=CFG.apex):
            y_preds = model(inputs)
        loss = criterion(y_preds.float(), labels)
        losses.append(loss.item())
        in_tail = step > last - tail
        scaler.scale(loss / (tail if in_tail else CFG.gradient_accumulation_steps)).backward()
        if (step + 1) % CFG.gradient_accumulation_steps == 0 or step == last:
            scaler.unscale_(optimizer)
            grad_norm = nn.utils.clip_grad_norm_(model.parameters(), CFG.max_grad_norm)
            scale = scaler.get_scale()
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            if CFG.batch_scheduler and scaler.get_scale() >= scale:
                scheduler.step()
    print(f"Epoch {epoch + 1} loss {np.mean(losses):.4f} grad {grad_norm:.4f}")


# In[5]:
def run(train_set):
    loader = DataLoader(train_set, batch_size=CFG.batch_size, shuffle=True)
    model = Scorer().to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=CFG.lr, eps=CFG.eps)
    steps = math.ceil(len(loader) / CFG.gradient_accumulation_steps) * CFG.epochs
    scheduler = get_cosine_schedule_with_warmup(optimizer, num_warmup_steps=0, num_training_steps=steps)
    scaler = torch.cuda.amp.GradScaler(enabled=CFG.apex)
    for epoch in range(CFG.epochs):
        train_fn(loader, model, nn.SmoothL1Loss(), optimizer, epoch, scheduler, scaler)
    return model
