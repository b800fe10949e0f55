# why correct: the gradient of the scaled output is multiplied by 1/scale before the penalty is formed, and the penalty itself is scaled again for its own backward pass
import torch
import torch.nn.functional as F
from torch import autograd


def squared_gradient(d_net, images, scaler, amp):
    images = images.detach().requires_grad_(True)
    with torch.autocast("cuda", dtype=torch.float16, enabled=amp):
        logits = d_net(images)
    (g,) = autograd.grad(scaler.scale(logits.float().sum()), images, create_graph=True)
    g = g.float() * (1.0 / scaler.get_scale())
    return logits, g.square().sum(dim=(1, 2, 3)).mean()


class DiscriminatorStep:
    def __init__(self, d_net, g_net, gamma=10.0, lazy=16, lr=2e-3, amp=True):
        ratio = lazy / (lazy + 1)
        self.d, self.g = d_net, g_net
        self.opt = torch.optim.Adam(d_net.parameters(), lr * ratio, betas=(0.0, 0.99**ratio))
        self.scaler = torch.amp.GradScaler("cuda", enabled=amp)
        self.gamma, self.lazy, self.amp = gamma, lazy, amp
        self.count = 0

    def main_part(self, real, z):
        with torch.no_grad(), torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
            fake = self.g(z)
        with torch.autocast("cuda", dtype=torch.float16, enabled=self.amp):
            lf, lr = self.d(fake), self.d(real)
        return F.softplus(lf.float()).mean() + F.softplus(-lr.float()).mean()

    def apply(self, loss):
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()

    def __call__(self, real, z):
        self.d.requires_grad_(True)
        loss = self.main_part(real, z)
        self.apply(loss)
        if self.count % self.lazy == 0:
            logits, r1 = squared_gradient(self.d, real, self.scaler, self.amp)
            self.apply(0.5 * self.gamma * self.lazy * r1 + 0.0 * logits.float().sum())
        self.count += 1
        self.d.requires_grad_(False)
        return loss.detach()

    def state_dict(self):
        return dict(opt=self.opt.state_dict(), scaler=self.scaler.state_dict(), count=self.count)

    def load_state_dict(self, s):
        self.opt.load_state_dict(s["opt"])
        self.scaler.load_state_dict(s["scaler"])
        self.count = s["count"]
