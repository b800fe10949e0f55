# source: https://github.com/pytorch/pytorch/issues/74739
# mistake: the whole model is cast to float16 and still trained with GradScaler, which refuses float16 gradients ("Attempting to unscale FP16 gradients")
# severity: error

# %% imports
import polars as pl
import torch
from sklearn.metrics import roc_auc_score
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

# %% data
frame = pl.read_parquet("clicks.parquet")
cat_cols = [c for c in frame.columns if c.startswith("cat_")]
num_cols = [c for c in frame.columns if c.startswith("num_")]
sizes = [int(frame[c].max()) + 1 for c in cat_cols]
cats = torch.tensor(frame.select(cat_cols).to_numpy(), dtype=torch.long)
nums = torch.tensor(frame.select(num_cols).to_numpy(), dtype=torch.float32)
nums = (nums - nums.mean(0)) / nums.std(0).clamp_min(1e-6)
label = torch.tensor(frame["click"].to_numpy(), dtype=torch.float32)
cut = int(0.9 * len(label))
train_ds = TensorDataset(cats[:cut], nums[:cut], label[:cut])
valid_ds = TensorDataset(cats[cut:], nums[cut:], label[cut:])


# %% model
class WideDeep(nn.Module):
    def __init__(self, sizes, n_num, dim=16):
        super().__init__()
        self.tables = nn.ModuleList(nn.Embedding(n, dim) for n in sizes)
        self.deep = nn.Sequential(
            nn.Linear(dim * len(sizes) + n_num, 512), nn.ReLU(), nn.Dropout(0.2),
            nn.Linear(512, 128), nn.ReLU(), nn.Linear(128, 1),
        )

    def forward(self, cat, num):
        parts = [t(cat[:, i]) for i, t in enumerate(self.tables)] + [num]
        return self.deep(torch.cat(parts, dim=1)).squeeze(1)


model = WideDeep(sizes, len(num_cols)).cuda()
model = model.half()  # <- here
opt = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)
scaler = torch.cuda.amp.GradScaler()  # <- here
criterion = nn.BCEWithLogitsLoss()

# %% training
for epoch in range(5):
    model.train()
    for cat, num, y in DataLoader(train_ds, 8192, shuffle=True, drop_last=True):
        cat, num, y = cat.cuda(), num.cuda().half(), y.cuda()
        opt.zero_grad()
        with torch.cuda.amp.autocast():
            loss = criterion(model(cat, num).float(), y)
        scaler.scale(loss).backward()
        scaler.step(opt)  # <- here
        scaler.update()

    model.eval()
    scores = []
    with torch.no_grad():
        for cat, num, _ in DataLoader(valid_ds, 32768):
            scores.append(model(cat.cuda(), num.cuda().half()).float().cpu())
    print(epoch, roc_auc_score(label[cut:].numpy(), torch.cat(scores).numpy()))
