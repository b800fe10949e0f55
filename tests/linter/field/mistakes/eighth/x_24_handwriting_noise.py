# source: rwth-i6/returnn PR #1595
# mistake: the gradient noise is added to the still scaled gradients, so after unscaling it is thousands of times smaller than asked for
# severity: error
import torch
from torch import nn
from torch.optim.lr_scheduler import MultiStepLR


def add_gradient_noise(params, std):
    if std <= 0:
        return
    for p in params:
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p.grad), alpha=std)  # <- here


class StepOptions:
    noise = 0.01
    noise_decay = 0.55
    clip_value = 0.0
    clip_norm = 5.0


class HandwritingRecognizer(nn.Module):
    def __init__(self, symbols, width=512):
        super().__init__()
        self.cnn = nn.Sequential(
            nn.Conv2d(1, 64, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(64, 128, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
            nn.Conv2d(128, 256, 3, padding=1), nn.ReLU(), nn.MaxPool2d((2, 1)),
        )
        self.rnn = nn.LSTM(256 * 8, width, 2, bidirectional=True, batch_first=True)
        self.out = nn.Linear(2 * width, symbols + 1)

    def forward(self, line):
        h = self.cnn(line)
        h = h.permute(0, 3, 1, 2).flatten(2)
        return self.out(self.rnn(h)[0])


class Updater:
    """Does everything between a loss and the new weights."""

    def __init__(self, model, lr=1e-3, opts=StepOptions(), amp=True):
        self.params = list(model.parameters())
        self.optimizer = torch.optim.Adam(self.params, lr=lr)
        self.scaler = torch.cuda.amp.GradScaler() if amp else None
        self.opts = opts
        self.count = 0

    def noise_now(self):
        return (self.opts.noise / (1 + self.count) ** self.opts.noise_decay) ** 0.5

    def __call__(self, loss):
        self.optimizer.zero_grad()
        if self.scaler is not None:
            self.scaler.scale(loss).backward()  # <- here
        else:
            loss.backward()
        add_gradient_noise(self.params, self.noise_now())  # <- here
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)  # <- here
        if self.opts.clip_value:
            nn.utils.clip_grad_value_(self.params, self.opts.clip_value)
        if self.opts.clip_norm:
            nn.utils.clip_grad_norm_(self.params, self.opts.clip_norm)
        if self.scaler is not None:
            self.scaler.step(self.optimizer)
            self.scaler.update()
        else:
            self.optimizer.step()
        self.count += 1


def train(loader, symbols, epochs=40, amp=True):
    model = HandwritingRecognizer(symbols).cuda()
    update = Updater(model, amp=amp)
    plan = MultiStepLR(update.optimizer, [20, 30], 0.3)
    ctc = nn.CTCLoss(zero_infinity=True)
    for epoch in range(epochs):
        model.train()
        for line, text, widths, lengths in loader:
            with torch.cuda.amp.autocast(enabled=amp):
                scores = model(line.cuda())
            logp = scores.float().log_softmax(-1).transpose(0, 1)
            loss = ctc(logp, text.cuda(), widths // 4, lengths)
            update(loss)
        plan.step()
        print(f"{epoch}: {loss.item():.3f}")
    return model
