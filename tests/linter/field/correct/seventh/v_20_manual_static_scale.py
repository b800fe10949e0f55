# why correct: a hand-written static scale with float32 master weights: gradients are copied to float32, divided by the scale, checked for inf, clipped and applied to the masters
import torch
import torch.nn as nn
import torch.nn.functional as F

SCALE = 1024.0


class HalfMLP(nn.Module):
    def __init__(self, i=784, w=1024, o=10):
        super().__init__()
        self.l1, self.l2, self.l3 = nn.Linear(i, w), nn.Linear(w, w), nn.Linear(w, o)

    def forward(self, x):
        return self.l3(F.relu(self.l2(F.relu(self.l1(x)))))


class Masters:
    def __init__(self, net):
        self.low = [p for p in net.parameters() if p.requires_grad]
        self.high = [p.detach().clone().float().requires_grad_(True) for p in self.low]

    def pull_grads(self, scale):
        finite = True
        for l, h in zip(self.low, self.high):
            if l.grad is None:
                h.grad = None
                continue
            h.grad = l.grad.float() / scale
            finite = finite and bool(torch.isfinite(h.grad).all())
        return finite

    @torch.no_grad()
    def push(self):
        for l, h in zip(self.low, self.high):
            l.copy_(h)

    def clear(self):
        for l in self.low:
            l.grad = None


def main(train, test, epochs=15):
    net = HalfMLP().cuda()
    masters = Masters(net)
    net.half()
    masters.low = list(net.parameters())
    opt = torch.optim.SGD(masters.high, lr=0.05, momentum=0.9)
    skipped = 0
    for e in range(epochs):
        for x, y in train:
            logits = net(x.flatten(1).cuda().half())
            loss = F.cross_entropy(logits.float(), y.cuda())
            masters.clear()
            (loss * SCALE).backward()
            if not masters.pull_grads(SCALE):
                skipped += 1
                continue
            nn.utils.clip_grad_norm_(masters.high, 2.0)
            opt.step()
            masters.push()
        with torch.no_grad():
            hits = [(net(x.flatten(1).cuda().half()).argmax(1).cpu() == y).float().mean().item() for x, y in test]
        print(e, loss.item(), sum(hits) / len(hits), "skipped", skipped)
    torch.save({"masters": [h.detach() for h in masters.high], "opt": opt.state_dict()}, "mlp.pt")


if __name__ == "__main__":
    from digits import loaders

    main(*loaders(256))
