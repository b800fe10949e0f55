# why correct: the gradients for the penalty come from the scaled loss but are divided by the current scale before the norm, then the whole loss is scaled for the real backward
import torch
import torch.nn as nn
import torch.nn.functional as F


class TextClassifier(nn.Module):
    def __init__(self, vocab, classes, dim=128):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.conv = nn.ModuleList(nn.Conv1d(dim, 128, k, padding=k // 2) for k in (3, 5, 7))
        self.out = nn.Linear(3 * 128, classes)

    def head(self, vectors):
        x = vectors.transpose(1, 2)
        return self.out(torch.cat([F.silu(c(x)).mean(-1) for c in self.conv], dim=1))


def regularized_step(net, ids, y, opt, scaler, strength):
    with torch.autocast("cuda", dtype=torch.float16):
        vectors = net.emb(ids)
        task = F.cross_entropy(net.head(vectors), y)

    big = torch.autograd.grad(scaler.scale(task), vectors, create_graph=True)[0]
    inverse = 1.0 / scaler.get_scale()
    small = big.float() * inverse

    with torch.autocast("cuda", dtype=torch.float16):
        penalty = small.flatten(1).norm(dim=1).square().mean()
        loss = task + strength * penalty

    opt.zero_grad(set_to_none=True)
    scaler.scale(loss).backward()
    scaler.unscale_(opt)
    nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    scaler.step(opt)
    scaler.update()
    return task.detach(), penalty.detach()


@torch.enable_grad()
def adversarial_direction(net, ids, y, radius=1e-2):
    """Float32 all the way, hence no scaling."""
    vectors = net.emb(ids).detach().requires_grad_()
    loss = F.cross_entropy(net.head(vectors), y)
    (g,) = torch.autograd.grad(loss, vectors)
    return radius * g / (g.norm(dim=(1, 2), keepdim=True) + 1e-12)


@torch.no_grad()
def robust_accuracy(net, batches):
    net.eval()
    hits = n = 0
    for ids, y in batches:
        ids, y = ids.cuda(), y.cuda()
        shift = adversarial_direction(net, ids, y)
        hits += (net.head(net.emb(ids) + shift).argmax(1) == y).sum().item()
        n += len(y)
    net.train()
    return hits / n


def train(net, batches, dev, epochs=10, strength=0.1):
    net = net.cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cuda")
    for epoch in range(epochs):
        for ids, y in batches:
            task, pen = regularized_step(net, ids.cuda(), y.cuda(), opt, scaler, strength)
        print(epoch, task.item(), pen.item(), robust_accuracy(net, dev))
