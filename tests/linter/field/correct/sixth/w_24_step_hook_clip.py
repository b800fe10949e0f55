# why correct: the clipping sits in an optimizer step pre-hook, which GradScaler.step triggers only after it has unscaled the gradients (and not at all for a skipped step)
import torch
from torch import nn
from torch.utils.tensorboard import SummaryWriter


class AutoClip:
    """Clip at a percentile of all gradient norms so far (Seetharaman et al., 2020)."""

    def __init__(self, percentile=10.0, writer=None):
        self.percentile = percentile
        self.history = []
        self.writer = writer

    def __call__(self, optimizer, args, kwargs):
        params = [p for g in optimizer.param_groups for p in g["params"] if p.grad is not None]
        norm = torch.linalg.vector_norm(torch.stack([torch.linalg.vector_norm(p.grad) for p in params]))
        self.history.append(norm.item())
        limit = torch.quantile(torch.tensor(self.history[-10_000:]), self.percentile / 100).item()
        nn.utils.clip_grad_norm_(params, limit)
        if self.writer:
            n = len(self.history)
            self.writer.add_scalar("grad/norm", self.history[-1], n)
            self.writer.add_scalar("grad/limit", limit, n)


class Separator(nn.Module):
    def __init__(self, bins=513, hidden=600, sources=4):
        super().__init__()
        self.norm = nn.LayerNorm(bins)
        self.rnn = nn.LSTM(bins, hidden, 4, batch_first=True, bidirectional=True, dropout=0.3)
        self.mask = nn.Linear(2 * hidden, bins * sources)
        self.sources = sources

    def forward(self, mag):
        h, _ = self.rnn(self.norm(torch.log1p(mag)))
        m = self.mask(h).float().view(*mag.shape, self.sources).softmax(-1)
        return m * mag.float().unsqueeze(-1)


def main(train_dl, val_dl, epochs=100, logdir="tb/separator"):
    writer = SummaryWriter(logdir)
    net = Separator().cuda()
    optimizer = torch.optim.Adam(net.parameters(), lr=1e-3)
    optimizer.register_step_pre_hook(AutoClip(writer=writer))
    plateau = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, patience=5)
    scaler = torch.amp.GradScaler("cuda")

    seen = 0
    for epoch in range(epochs):
        net.train()
        for mix, parts in train_dl:
            mix, parts = mix.cuda(non_blocking=True), parts.cuda(non_blocking=True)
            optimizer.zero_grad()
            with torch.autocast("cuda", dtype=torch.float16):
                estimate = net(mix)
                loss = (estimate - parts).abs().mean()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
            seen += 1
            if seen % 50 == 0:
                writer.add_scalar("loss/train", loss.item(), seen)
                writer.add_scalar("amp/scale", scaler.get_scale(), seen)

        net.eval()
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16):
            val = [(net(m.cuda()) - p.cuda()).abs().mean().item() for m, p in val_dl]
        val = sum(val) / len(val)
        plateau.step(val)
        writer.add_scalar("loss/val", val, epoch)
        torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "plateau": plateau.state_dict(),
                    "scaler": scaler.state_dict(), "epoch": epoch}, f"{logdir}/last.pt")
    writer.close()
