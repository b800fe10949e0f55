# why correct: bfloat16 autocast has float32's exponent range, so plain backward, clip and step without any GradScaler are right; the weights stay float32
import os

import torch
import torch.distributed as dist
import torch.nn as nn
import torch.nn.functional as F
from torch.nn.parallel import DistributedDataParallel as DDP

from wav.data import masked_units_loader


class UnitBert(nn.Module):
    def __init__(self, units=500, dim=768, layers=12):
        super().__init__()
        self.front = nn.Conv1d(80, dim, 3, stride=2, padding=1)
        self.mask = nn.Parameter(torch.zeros(dim).uniform_())
        self.enc = nn.TransformerEncoder(
            nn.TransformerEncoderLayer(dim, 12, 4 * dim, activation="gelu", batch_first=True, norm_first=True), layers
        )
        self.out = nn.Linear(dim, units)

    def forward(self, mel, masked):
        h = self.front(mel).transpose(1, 2)
        h = torch.where(masked.unsqueeze(-1), self.mask.to(h.dtype), h)
        return self.out(self.enc(h))


def main():
    dist.init_process_group("nccl")
    local = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(local)
    torch.backends.cuda.matmul.allow_tf32 = True

    net = UnitBert().cuda()
    model = DDP(net, device_ids=[local])
    opt = torch.optim.AdamW(net.parameters(), lr=5e-4, betas=(0.9, 0.98), weight_decay=0.01, fused=True)
    sched = torch.optim.lr_scheduler.OneCycleLR(opt, 5e-4, total_steps=250_000, pct_start=0.08)

    for step, (mel, masked, units) in enumerate(masked_units_loader(dist.get_rank())):
        mel, masked, units = mel.cuda(), masked.cuda(), units.cuda()
        with torch.autocast("cuda", dtype=torch.bfloat16):
            logits = model(mel, masked)
            loss = F.cross_entropy(logits[masked], units[masked])
        opt.zero_grad(set_to_none=True)
        loss.backward()
        norm = nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        opt.step()
        sched.step()
        if step % 100 == 0 and dist.get_rank() == 0:
            print(f"{step} {loss.item():.3f} {norm.item():.3f}", flush=True)
        if step + 1 == 250_000:
            break
    if dist.get_rank() == 0:
        torch.save({"net": net.state_dict(), "opt": opt.state_dict(), "sched": sched.state_dict()}, "unitbert.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
