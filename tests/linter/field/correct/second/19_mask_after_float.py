"""
# style of: jadore801120/attention-is-all-you-need-pytorch:transformer/Modules.py
# correct: the scores are cast to float32 before the -1e9 mask is filled in, so the literal fits; the probabilities go back to the value's dtype.
# torch: 1.10+
"""
import torch
import torch.nn as nn
import torch.nn.functional as F


class ScaledDotProductAttention(nn.Module):
    def __init__(self, temperature, attn_dropout=0.1):
        super().__init__()
        self.temperature = temperature
        self.dropout = nn.Dropout(attn_dropout)

    def forward(self, q, k, v, mask=None):
        attn = torch.matmul(q / self.temperature, k.transpose(2, 3)).float()
        if mask is not None:
            attn = attn.masked_fill(mask == 0, -1e9)
        attn = self.dropout(F.softmax(attn, dim=-1)).to(v.dtype)
        return torch.matmul(attn, v), attn


class MultiHeadAttention(nn.Module):
    def __init__(self, n_head, d_model, d_k, d_v, dropout=0.1):
        super().__init__()
        self.n_head, self.d_k, self.d_v = n_head, d_k, d_v
        self.w_qs = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_ks = nn.Linear(d_model, n_head * d_k, bias=False)
        self.w_vs = nn.Linear(d_model, n_head * d_v, bias=False)
        self.fc = nn.Linear(n_head * d_v, d_model, bias=False)
        self.attention = ScaledDotProductAttention(temperature=d_k**0.5)
        self.dropout = nn.Dropout(dropout)
        self.layer_norm = nn.LayerNorm(d_model, eps=1e-6)

    def forward(self, q, k, v, mask=None):
        b, lq, lk, lv, residual = q.size(0), q.size(1), k.size(1), v.size(1), q
        q = self.w_qs(q).view(b, lq, self.n_head, self.d_k).transpose(1, 2)
        k = self.w_ks(k).view(b, lk, self.n_head, self.d_k).transpose(1, 2)
        v = self.w_vs(v).view(b, lv, self.n_head, self.d_v).transpose(1, 2)
        out, attn = self.attention(q, k, v, mask=mask.unsqueeze(1) if mask is not None else None)
        out = self.dropout(self.fc(out.transpose(1, 2).reshape(b, lq, -1)))
        return self.layer_norm(out + residual), attn


class TinyTranslator(nn.Module):
    def __init__(self, vocab, d_model=512, n_head=8, pad=0):
        super().__init__()
        self.pad = pad
        self.embed = nn.Embedding(vocab, d_model, padding_idx=pad)
        self.layers = nn.ModuleList(MultiHeadAttention(n_head, d_model, 64, 64) for _ in range(4))
        self.prj = nn.Linear(d_model, vocab, bias=False)

    def forward(self, seq):
        causal = torch.ones(seq.size(1), seq.size(1), device=seq.device).tril().bool()
        mask = (seq != self.pad).unsqueeze(-2) & causal
        x = self.embed(seq)
        for layer in self.layers:
            x, _ = layer(x, x, x, mask=mask)
        return self.prj(x)


def train_epoch(model, data, optimizer, scaler, pad=0):
    model.train()
    for seq in data:
        seq = seq.cuda()
        optimizer.zero_grad()
        with torch.cuda.amp.autocast():
            pred = model(seq[:, :-1])
            loss = F.cross_entropy(pred.transpose(1, 2), seq[:, 1:], ignore_index=pad, label_smoothing=0.1)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


def main(vocab, data, epochs=10):
    model = TinyTranslator(vocab).cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=2e-4, betas=(0.9, 0.98), eps=1e-9)
    scaler = torch.cuda.amp.GradScaler()
    for _ in range(epochs):
        train_epoch(model, data, optimizer, scaler)
