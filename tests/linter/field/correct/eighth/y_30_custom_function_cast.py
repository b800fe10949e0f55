# why correct: the autograd function is decorated with custom_fwd(cast_inputs=float32) and custom_bwd, so its forward and backward both run in float32 whatever autocast does outside.
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.autograd import Function
from torch.cuda.amp import GradScaler, autocast, custom_bwd, custom_fwd


class SoftRank(Function):
    """Pairwise soft ranks with a hand-written gradient."""

    @staticmethod
    @custom_fwd(cast_inputs=torch.float32)
    def forward(ctx, scores, temperature):
        diff = (scores[:, None, :] - scores[:, :, None]) / temperature
        sig = torch.sigmoid(diff)
        ctx.save_for_backward(sig)
        ctx.temperature = temperature
        return sig.sum(-1) + 0.5

    @staticmethod
    @custom_bwd
    def backward(ctx, grad):
        (sig,) = ctx.saved_tensors
        slope = sig * (1 - sig) / ctx.temperature
        through = (grad[:, :, None] * slope).sum(1)
        direct = grad * slope.sum(-1)
        return through - direct, None


def soft_rank(scores, temperature=0.1):
    return SoftRank.apply(scores, temperature)


def ndcg_surrogate(scores, gains):
    rank = soft_rank(scores)
    dcg = (gains / torch.log2(rank + 1)).sum(-1)
    ideal = gains.sort(-1, descending=True).values
    steps = torch.arange(gains.shape[1], device=gains.device, dtype=torch.float32)
    idcg = (ideal / torch.log2(steps + 2)).sum(-1)
    return 1 - (dcg / idcg.clamp(min=1e-6)).mean()


class Ranker(nn.Module):
    def __init__(self, features, width=512, depth=4):
        super().__init__()
        self.norm = nn.BatchNorm1d(features)
        layers, d = [], features
        for _ in range(depth):
            layers += [nn.Linear(d, width), nn.LayerNorm(width), nn.GELU(), nn.Dropout(0.1)]
            d = width
        self.body = nn.Sequential(*layers, nn.Linear(d, 1))

    def forward(self, x):
        b, n, f = x.shape
        x = self.norm(x.reshape(b * n, f))
        return self.body(x).view(b, n)


class RankingTrainer:
    def __init__(self, features, lr=1e-3, steps=50000, warm=0.1):
        self.model = Ranker(features).cuda()
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr)
        self.scaler = GradScaler()
        self.warm = warm
        self.steps = steps

    def loss(self, x, gains):
        with autocast():
            scores = self.model(x)
            listwise = F.kl_div(F.log_softmax(scores, -1), F.softmax(gains, -1), reduction="batchmean")
            smooth = ndcg_surrogate(scores, gains)
        return self.warm * listwise + smooth

    def fit(self, batches, valid, every=1000):
        self.model.train()
        for step, (x, gains) in zip(range(1, self.steps + 1), batches):
            self.optimizer.zero_grad(set_to_none=True)
            loss = self.loss(x.cuda(), gains.cuda().float())
            self.scaler.scale(loss).backward()
            self.scaler.unscale_(self.optimizer)
            nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            self.scaler.step(self.optimizer)
            self.scaler.update()
            if step % every == 0:
                print(step, f"loss {loss.item():.4f} ndcg {self.ndcg(valid):.4f}")
                torch.save({"model": self.model.state_dict(), "optimizer": self.optimizer.state_dict(),
                            "scaler": self.scaler.state_dict(), "step": step}, "ranker.pt")

    @torch.no_grad()
    def ndcg(self, loader):
        self.model.eval()
        values = []
        for x, gains in loader:
            with autocast():
                scores = self.model(x.cuda())
            order = scores.float().argsort(-1, descending=True).cpu()
            disc = torch.log2(torch.arange(gains.shape[1]) + 2.0)
            got = (gains.float().gather(1, order) / disc).sum(-1)
            best = (gains.float().sort(-1, descending=True).values / disc).sum(-1)
            values.append(got / best.clamp(min=1e-6))
        self.model.train()
        return torch.cat(values).mean().item()
