# why correct: the fill value is the minimum of the scores' own dtype, softmax runs in float32, and every row has at least one valid key
import torch
import torch.nn.functional as F
from einops import rearrange
from ignite.engine import Engine, Events
from ignite.handlers import Checkpoint, DiskSaver
from torch import nn


class MaskedAttention(nn.Module):
    def __init__(self, dim, heads=4):
        super().__init__()
        self.heads, self.scale = heads, (dim // heads) ** -0.5
        self.to_q, self.to_kv = nn.Linear(dim, dim, bias=False), nn.Linear(dim, 2 * dim, bias=False)
        self.out = nn.Linear(dim, dim)

    def forward(self, queries, points, valid):
        q = rearrange(self.to_q(queries) * self.scale, "b n (h d) -> b h n d", h=self.heads)
        k, v = (rearrange(t, "b n (h d) -> b h n d", h=self.heads) for t in self.to_kv(points).chunk(2, -1))
        sim = q @ k.transpose(-1, -2)
        floor = -torch.finfo(sim.dtype).max
        sim = sim.masked_fill(~valid[:, None, None, :], floor)
        attn = F.softmax(sim, dim=-1, dtype=torch.float32).to(v.dtype)
        return self.out(rearrange(attn @ v, "b h n d -> b n (h d)"))


class PointClassifier(nn.Module):
    def __init__(self, dim=256, latents=32, classes=40, depth=4):
        super().__init__()
        self.embed = nn.Sequential(nn.Linear(3, dim), nn.GELU(), nn.Linear(dim, dim))
        self.latents = nn.Parameter(torch.randn(latents, dim) * 0.02)
        self.cross = nn.ModuleList(MaskedAttention(dim) for _ in range(depth))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(depth))
        self.head = nn.Linear(dim, classes)

    def forward(self, xyz, valid):
        valid = valid.clone()
        valid[:, 0] = True
        pts = self.embed(xyz)
        lat = self.latents.expand(len(xyz), -1, -1)
        for norm, attend in zip(self.norms, self.cross):
            lat = lat + attend(norm(lat), pts, valid)
        return self.head(lat.mean(1))


def create_trainer(model, optimizer, scaler):
    def update(engine, batch):
        xyz, valid, label = (t.cuda(non_blocking=True) for t in batch)
        model.train()
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(xyz, valid), label, label_smoothing=0.2)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        scaler.step(optimizer)
        scaler.update()
        return loss.item()

    return Engine(update)


def run(loader, epochs=200, resume=None):
    model = PointClassifier().cuda()
    optimizer = torch.optim.AdamW(model.parameters(), 1e-3, weight_decay=0.05)
    scaler = torch.amp.GradScaler("cuda")
    trainer = create_trainer(model, optimizer, scaler)
    parts = {"model": model, "optimizer": optimizer, "scaler": scaler, "trainer": trainer}
    trainer.add_event_handler(Events.EPOCH_COMPLETED, Checkpoint(parts, DiskSaver("pc", require_empty=False), n_saved=2))
    if resume:
        Checkpoint.load_objects(parts, torch.load(resume, map_location="cpu"))

    @trainer.on(Events.EPOCH_COMPLETED)
    def report(engine):
        print(engine.state.epoch, engine.state.output)

    trainer.run(loader, max_epochs=epochs)
