# source: https://github.com/galilai-group/stable-pretraining/pull/333
# mistake: update() between two steps forgets that the second optimizer was already unscaled, so its step divides the gradients by the scale once more.
# severity: error
# torch: any
import torch
import torch.nn as nn
import torch.nn.functional as F


class ProbedEncoder:
    """A self-supervised encoder with an online linear probe, each with its own optimizer."""

    def __init__(self, encoder: nn.Module, feat_dim: int, n_classes: int, clip: float = 1.0):
        self.encoder = encoder.cuda()
        self.probe = nn.Linear(feat_dim, n_classes).cuda()
        self.opt_main = torch.optim.AdamW(self.encoder.parameters(), lr=1e-3)
        self.opt_probe = torch.optim.SGD(self.probe.parameters(), lr=0.1, momentum=0.9)
        self.scaler = torch.amp.GradScaler("cuda")
        self.clip = clip

    def training_step(self, view_a, view_b, label):
        self.opt_main.zero_grad()
        self.opt_probe.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            za, zb = self.encoder(view_a), self.encoder(view_b)
            ssl_loss = 2 - 2 * F.cosine_similarity(za.float(), zb.float(), dim=-1).mean()
            probe_loss = F.cross_entropy(self.probe(za.detach()), label)
        self.scaler.scale(ssl_loss + probe_loss).backward()

        for opt, module in ((self.opt_main, self.encoder), (self.opt_probe, self.probe)):
            self.scaler.unscale_(opt)
            nn.utils.clip_grad_norm_(module.parameters(), self.clip)

        self.scaler.step(self.opt_main)
        self.scaler.update()  # <- here
        self.scaler.step(self.opt_probe)
        self.scaler.update()
        return ssl_loss.item(), probe_loss.item()


def fit(module: ProbedEncoder, loader, epochs: int):
    for epoch in range(epochs):
        for a, b, y in loader:
            ssl, probe = module.training_step(a.cuda(), b.cuda(), y.cuda())
        print(f"{epoch}: ssl {ssl:.3f} probe {probe:.3f}")
