# source: https://github.com/pytorch/pytorch/pull/36601
# mistake: scaler.update() runs after every micro-batch although the step comes only every fourth; without a preceding step it raises, and it would change the scale within one accumulation
# severity: error
import torch
from torch import nn
from torch.nn import functional as F


class TrajectoryNet(nn.Module):
    """Predicts the next 12 positions of a vehicle from 20 past ones and its neighbours."""

    def __init__(self, dim=128):
        super().__init__()
        self.past = nn.GRU(4, dim, batch_first=True)
        self.others = nn.Sequential(nn.Linear(4, dim), nn.ReLU(), nn.Linear(dim, dim))
        self.attend = nn.MultiheadAttention(dim, 4, batch_first=True)
        self.future = nn.Linear(2 * dim, 24)

    def forward(self, track, neighbours):
        _, h = self.past(track)
        h = h[-1]
        others = self.others(neighbours)
        context, _ = self.attend(h[:, None], others, others, need_weights=False)
        return self.future(torch.cat([h, context[:, 0]], dim=-1)).view(-1, 12, 2)


def make_parts(lr):
    net = TrajectoryNet().cuda()
    opt = torch.optim.AdamW(net.parameters(), lr=lr)
    scaler = torch.cuda.amp.GradScaler(growth_interval=1000)
    return net, opt, scaler


def forward_loss(net, batch):
    track, neighbours, future = (t.cuda(non_blocking=True) for t in batch)
    with torch.cuda.amp.autocast():
        predicted = net(track, neighbours)
        return F.smooth_l1_loss(predicted.float(), future)


def accumulate_epoch(net, opt, scaler, loader, every=4):
    net.train()
    opt.zero_grad(set_to_none=True)
    usable = len(loader) - len(loader) % every
    history = []
    for i, batch in enumerate(loader, start=1):
        if i > usable:
            break
        loss = forward_loss(net, batch)
        scaler.scale(loss / every).backward()
        if i % every == 0:
            scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(net.parameters(), 5.0)
            scaler.step(opt)
            opt.zero_grad(set_to_none=True)
        scaler.update()  # <- here
        history.append(loss.detach())
    return torch.stack(history).mean().item()


@torch.no_grad()
def displacement(net, loader):
    net.eval()
    total, count = 0.0, 0
    for track, neighbours, future in loader:
        guess = net(track.cuda(), neighbours.cuda())
        total += (guess - future.cuda()).norm(dim=-1).mean(1).sum().item()
        count += future.shape[0]
    return total / count


def main(train_loader, val_loader, epochs=25, lr=3e-4):
    net, opt, scaler = make_parts(lr)
    for epoch in range(epochs):
        loss = accumulate_epoch(net, opt, scaler, train_loader)
        print(f"{epoch:3d} loss {loss:.4f} displacement {displacement(net, val_loader):.3f} m")
    torch.save(net.state_dict(), "trajectory.pt")
