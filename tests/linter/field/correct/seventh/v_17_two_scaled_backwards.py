# why correct: both backward calls go through scaler.scale with the same scale, so the summed gradients are uniformly scaled and unscaled once
import torch
import torch.nn.functional as F
from torch import nn


class SparseAE(nn.Module):
    def __init__(self, d=768, m=16_384):
        super().__init__()
        self.enc = nn.Linear(d, m)
        self.dec = nn.Linear(m, d)

    def forward(self, x):
        code = F.relu(self.enc(x))
        return self.dec(code), code

    def decoder_orthogonality(self, k=512):
        pick = torch.randperm(self.dec.weight.size(1), device=self.dec.weight.device)[:k]
        w = F.normalize(self.dec.weight[:, pick], dim=0)
        eye = torch.eye(k, device=w.device)
        return (w.t() @ w - eye).square().mean()


class Backwarder:
    def __init__(self, optimizer, scaler):
        self.o, self.s = optimizer, scaler

    def __enter__(self):
        self.o.zero_grad(set_to_none=True)
        return self.add

    def add(self, loss, keep_graph=False):
        self.s.scale(loss).backward(retain_graph=keep_graph)

    def __exit__(self, kind, *_):
        if kind is not None:
            return False
        self.s.unscale_(self.o)
        nn.utils.clip_grad_norm_([p for g in self.o.param_groups for p in g["params"]], 1.0)
        self.s.step(self.o)
        self.s.update()
        return False


def main(activations, l1=5e-4, ortho=1e-2):
    ae = SparseAE().cuda()
    opt = torch.optim.Adam(ae.parameters(), 1e-4, betas=(0.9, 0.999))
    scaler = torch.cuda.amp.GradScaler()
    update = Backwarder(opt, scaler)
    for i, x in enumerate(activations):
        x = x.cuda().float()
        with torch.cuda.amp.autocast(dtype=torch.float16):
            rec, code = ae(x)
        rec_loss = F.mse_loss(rec.float(), x)
        sparse = l1 * code.float().abs().sum(-1).mean()
        reg = ortho * ae.decoder_orthogonality()
        with update as add:
            add(rec_loss, keep_graph=True)
            add(sparse)
            add(reg)
        if i % 500 == 0:
            print(i, rec_loss.item(), sparse.item(), reg.item(), (code > 0).float().mean().item())
            torch.save({"ae": ae.state_dict(), "opt": opt.state_dict(), "scaler": scaler.state_dict()}, "sae.pt")


if __name__ == "__main__":
    from acts import stream

    main(stream(batch=4096))
