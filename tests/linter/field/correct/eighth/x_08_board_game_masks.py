# why correct: -1e9 is filled into float32 scores, and the attention uses the minimum of the scores' own dtype
import torch
import torch.nn as nn
import torch.nn.functional as F


class BoardAttention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(dim, 3 * dim)
        self.out = nn.Linear(dim, dim)

    def forward(self, x, empty):
        b, n, d = x.shape
        q, k, v = self.qkv(x).view(b, n, 3, self.heads, d // self.heads).permute(2, 0, 3, 1, 4)
        score = (q * (d // self.heads) ** -0.5) @ k.transpose(-2, -1)
        score = score.masked_fill(empty[:, None, None, :], torch.finfo(score.dtype).min)
        y = (score.softmax(-1).to(v.dtype) @ v).transpose(1, 2).reshape(b, n, d)
        return self.out(y)


class BoardNet(nn.Module):
    def __init__(self, pieces=13, squares=64, moves=4672, dim=256, depth=8):
        super().__init__()
        self.piece = nn.Embedding(pieces, dim)
        self.square = nn.Parameter(torch.randn(squares, dim) * 0.02)
        self.att = nn.ModuleList(BoardAttention(dim) for _ in range(depth))
        self.mlp = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(dim), nn.Linear(dim, 3 * dim), nn.GELU(), nn.Linear(3 * dim, dim)) for _ in range(depth)
        )
        self.norm = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.policy = nn.Linear(dim, moves)
        self.value = nn.Linear(dim, 3)

    def forward(self, board, legal):
        empty = board == 0
        h = self.piece(board) + self.square
        for norm, att, mlp in zip(self.norm, self.att, self.mlp):
            h = h + att(norm(h), empty)
            h = h + mlp(h)
        h = h.mean(1)
        policy = self.policy(h).float().masked_fill(~legal, -1e9)
        return policy, self.value(h).float()


def policy_value_loss(policy, value, visits, outcome):
    logp = F.log_softmax(policy, dim=-1)
    return -(visits * logp).sum(-1).mean() + F.cross_entropy(value, outcome)


def learn(net, replay, steps, lr=1e-3):
    net.cuda().train()
    optimizer = torch.optim.SGD(net.parameters(), lr=lr, momentum=0.9, weight_decay=1e-4, nesterov=True)
    scaler = torch.cuda.amp.GradScaler(growth_interval=1000)
    for step in range(steps):
        board, legal, visits, outcome = (t.cuda(non_blocking=True) for t in replay.sample(1024))
        with torch.cuda.amp.autocast():
            loss = policy_value_loss(*net(board, legal), visits, outcome)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        if step % 100 == 0:
            print(step, loss.item())
    torch.save(net.state_dict(), "board.pt")
