# source: locuslab/open-unlearning pull request #156
# mistake: the embeddings come out of a bfloat16 autocast region in bfloat16 and are turned into numpy without a cast; numpy has no bfloat16 and the call raises a TypeError
# severity: error
import numpy as np
import torch
from torch import nn
from tqdm import tqdm


class ProductTower(nn.Module):
    def __init__(self, vocab=60_000, d=256, out=128):
        super().__init__()
        self.bag = nn.EmbeddingBag(vocab, d, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(d, 512), nn.GELU(), nn.Linear(512, out))

    def forward(self, ids, offsets):
        return self.mlp(self.bag(ids, offsets))


class TwoTower(nn.Module):
    def __init__(self):
        super().__init__()
        self.query = ProductTower()
        self.item = ProductTower()
        self.log_t = nn.Parameter(torch.tensor(2.66))

    def similarity(self, q, i):
        q = nn.functional.normalize(q.float(), dim=-1)
        i = nn.functional.normalize(i.float(), dim=-1)
        return q @ i.t() * self.log_t.exp().clamp(max=100)


def amp():
    return torch.autocast(device_type="cuda", dtype=torch.bfloat16)


def train_epoch(net, loader, opt):
    net.train()
    bar = tqdm(loader)
    for (q_ids, q_off), (i_ids, i_off) in bar:
        with amp():
            q = net.query(q_ids.cuda(), q_off.cuda())
            i = net.item(i_ids.cuda(), i_off.cuda())
        with torch.autocast("cuda", enabled=False):
            sim = net.similarity(q, i)
            label = torch.arange(sim.size(0), device=sim.device)
            loss = (nn.functional.cross_entropy(sim, label) + nn.functional.cross_entropy(sim.t(), label)) / 2
        opt.zero_grad(set_to_none=True)
        loss.backward()
        opt.step()
        bar.set_postfix(loss=f"{loss.item():.3f}")


@torch.inference_mode()
def embed(tower, loader):
    tower.eval()
    chunks = []
    for ids, offsets in loader:
        with amp():
            vec = tower(ids.cuda(), offsets.cuda())  # <- here
        chunks.append(vec.cpu().numpy())  # <- here
    return np.concatenate(chunks)


def recall_at(queries, items, truth, ks=(1, 10, 100)):
    queries = queries / np.linalg.norm(queries, axis=1, keepdims=True)
    items = items / np.linalg.norm(items, axis=1, keepdims=True)
    order = np.argsort(-(queries @ items.T), axis=1)[:, : max(ks)]
    hit = order == truth[:, None]
    return {k: float(hit[:, :k].any(1).mean()) for k in ks}


def main(loaders, truth, epochs=10):
    net = TwoTower().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=1e-3, weight_decay=1e-5)
    for epoch in range(epochs):
        train_epoch(net, loaders["pairs"], opt)
        report = recall_at(embed(net.query, loaders["queries"]), embed(net.item, loaders["items"]), truth)
        print(epoch, " ".join(f"R@{k}={v:.3f}" for k, v in report.items()))
        torch.save(net.state_dict(), f"two_tower_{epoch}.pt")
