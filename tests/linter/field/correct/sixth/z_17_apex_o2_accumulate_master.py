# why correct: apex O2 with accumulation: delay_unscale on all but the last micro batch, then amp.master_params(optimizer) is clipped, which holds unscaled gradients after scale_loss
import os

import torch
from apex import amp
from apex.parallel import DistributedDataParallel as DDP
from torch import nn
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

ACC = 4


def setup():
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    torch.distributed.init_process_group("nccl", init_method="env://")
    return rank


class LangID(nn.Module):
    def __init__(self, vocab=8000, dim=512, langs=107):
        super().__init__()
        self.emb = nn.EmbeddingBag(vocab, dim, mode="mean")
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.ReLU(), nn.Dropout(0.2), nn.Linear(4 * dim, langs))

    def forward(self, ids, offsets):
        return self.mlp(self.emb(ids, offsets))


def resume(path, model, optimizer):
    ck = torch.load(path, map_location="cpu")
    model.load_state_dict(ck["model"])
    optimizer.load_state_dict(ck["optimizer"])
    amp.load_state_dict(ck["amp"])
    return ck["epoch"] + 1


def main(dataset, path="langid.pt", epochs=10):
    rank = setup()
    model = LangID().cuda()
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    model, optimizer = amp.initialize(model, optimizer, opt_level="O2", loss_scale="dynamic")
    first = resume(path, model, optimizer) if os.path.exists(path) else 0
    ddp = DDP(model, delay_allreduce=True)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, 256, sampler=sampler, collate_fn=dataset.collate, drop_last=True)
    usable = len(loader) // ACC * ACC
    for epoch in range(first, epochs):
        sampler.set_epoch(epoch)
        ddp.train()
        optimizer.zero_grad()
        for i, (ids, offsets, y) in enumerate(loader):
            if i == usable:
                break
            boundary = (i + 1) % ACC == 0
            loss = nn.functional.cross_entropy(ddp(ids.cuda(), offsets.cuda()).float(), y.cuda()) / ACC
            with amp.scale_loss(loss, optimizer, delay_unscale=not boundary) as scaled:
                scaled.backward()
            if boundary:
                torch.nn.utils.clip_grad_norm_(amp.master_params(optimizer), 1.0)
                optimizer.step()
                optimizer.zero_grad()
        if rank == 0:
            print("epoch", epoch, "loss", loss.item() * ACC)
            torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "amp": amp.state_dict(),
                        "epoch": epoch}, path)
