# source: EleutherAI/gpt-neox PR #1016 (issue #1003)
# mistake: model.to(torch.bfloat16) also casts the inv_freq buffer, and the positions take its dtype; bfloat16 can't tell 256 from 257, so rotary angles are wrong
# severity: warning
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as DDP


class Rotary(nn.Module):
    def __init__(self, dim, base=10_000.0):
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / base ** (torch.arange(0, dim, 2).float() / dim))  # <- here

    def forward(self, x):
        t = torch.arange(x.shape[-2], device=x.device).type_as(self.inv_freq)  # <- here
        angle = torch.einsum("i,j->ij", t, self.inv_freq)  # <- here
        angle = torch.cat((angle, angle), -1)
        half = x.shape[-1] // 2
        rot = torch.cat((-x[..., half:], x[..., :half]), -1)
        return x * angle.cos().to(x.dtype) + rot * angle.sin().to(x.dtype)  # <- here


class Layer(nn.Module):
    def __init__(self, dim, heads):
        super().__init__()
        self.heads = heads
        self.n1, self.n2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.qkv, self.proj = nn.Linear(dim, 3 * dim, bias=False), nn.Linear(dim, dim, bias=False)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))
        self.rotary = Rotary(dim // heads)

    def forward(self, x):
        b, l, c = x.shape
        q, k, v = self.qkv(self.n1(x)).view(b, l, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = nn.functional.scaled_dot_product_attention(self.rotary(q), self.rotary(k), v)
        x = x + self.proj(y.transpose(1, 2).reshape(b, l, c))
        return x + self.mlp(self.n2(x))


class ProteinLM(nn.Module):
    def __init__(self, vocab=33, dim=1280, depth=33, heads=20):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim)
        self.layers = nn.ModuleList([Layer(dim, heads) for _ in range(depth)])
        self.norm, self.head = nn.LayerNorm(dim), nn.Linear(dim, vocab)

    def forward(self, ids):
        x = self.embed(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


class MasterAdamW:
    """bf16 network, fp32 masters."""

    def __init__(self, params, **kw):
        self.low = [p for p in params if p.requires_grad]
        self.high = [nn.Parameter(p.detach().float().clone()) for p in self.low]
        self.inner = torch.optim.AdamW(self.high, **kw)

    @torch.no_grad()
    def step(self):
        for hi, lo in zip(self.high, self.low):
            hi.grad, lo.grad = lo.grad.float(), None
        nn.utils.clip_grad_norm_(self.high, 1.0)
        self.inner.step()
        for hi, lo in zip(self.high, self.low):
            lo.copy_(hi)
            hi.grad = None


def main(loader):
    dist.init_process_group("nccl")
    torch.cuda.set_device(dist.get_rank() % 8)
    net = ProteinLM().cuda()
    opt = MasterAdamW(net.parameters(), lr=4e-4, weight_decay=0.01)
    net.to(torch.bfloat16)  # <- here
    ddp = DDP(net)
    for ids, targets in loader:
        logits = ddp(ids.cuda())
        loss = nn.functional.cross_entropy(logits.float().flatten(0, 1), targets.cuda().flatten(), ignore_index=-100)
        loss.backward()
        opt.step()
