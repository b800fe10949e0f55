# why correct: the custom op is decorated with custom_fwd/custom_bwd for float32, and checkpointed blocks restore autocast when recomputed
import torch
from torch import nn
from torch.amp import GradScaler, autocast, custom_bwd, custom_fwd
from torch.utils.checkpoint import checkpoint


class SignedRoot(torch.autograd.Function):
    """sign(x) * (sqrt(|x| + 1) - 1)"""

    @staticmethod
    @custom_fwd(device_type="cuda", cast_inputs=torch.float32)
    def forward(ctx, x):
        root = (x.abs() + 1.0).sqrt()
        ctx.save_for_backward(root)
        return x.sign() * (root - 1.0)

    @staticmethod
    @custom_bwd(device_type="cuda")
    def backward(ctx, grad):
        (root,) = ctx.saved_tensors
        return grad * 0.5 / root


class Block(nn.Module):
    def __init__(self, ch):
        super().__init__()
        self.conv1 = nn.Conv1d(ch, ch, 5, padding=2)
        self.conv2 = nn.Conv1d(ch, ch, 5, padding=2)
        self.norm = nn.GroupNorm(8, ch)

    def forward(self, x):
        return x + self.conv2(SignedRoot.apply(self.conv1(self.norm(x))))


class EcgNet(nn.Module):
    def __init__(self, leads=12, ch=128, depth=16, classes=27):
        super().__init__()
        self.stem = nn.Conv1d(leads, ch, 15, stride=4, padding=7)
        self.blocks = nn.ModuleList(Block(ch) for _ in range(depth))
        self.head = nn.Linear(ch, classes)

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            if self.training:
                x = checkpoint(block, x, use_reentrant=False)
            else:
                x = block(x)
        return self.head(x.float().mean(-1))


class EcgTrainer:
    def __init__(self, net, lr=1e-3):
        self.net = net.cuda()
        self.opt = torch.optim.AdamW(net.parameters(), lr=lr)
        self.scaler = GradScaler("cuda")
        self.loss_fn = nn.BCEWithLogitsLoss()

    def _forward(self, x, y):
        with autocast("cuda", dtype=torch.float16):
            return self.loss_fn(self.net(x), y)

    def _update(self, loss):
        self.opt.zero_grad(set_to_none=True)
        self.scaler.scale(loss).backward()
        self.scaler.step(self.opt)
        self.scaler.update()

    def fit(self, loader, epochs):
        for epoch in range(epochs):
            self.net.train()
            for x, y in loader:
                loss = self._forward(x.cuda(), y.cuda().float())
                self._update(loss)
            print(epoch, loss.item())
