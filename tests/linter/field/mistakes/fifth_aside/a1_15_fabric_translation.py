# source: Lightning-AI/pytorch-lightning PR #19447 ("Inform the user about a missing fabric.backward() call")
# mistake: loss.backward() is called instead of fabric.backward(loss) with precision 16-mixed, so the loss is never scaled while the wrapped optimizer's step expects a scaler that was used
# severity: error
import math

import lightning as L
import torch
import torch.nn as nn
from torch.utils.data import DataLoader

from nmt.corpus import ParallelText, batchify


class Seq2Seq(nn.Module):
    def __init__(self, vocab: int, dim: int = 512):
        super().__init__()
        self.embed = nn.Embedding(vocab, dim, padding_idx=0)
        self.pos = nn.Parameter(torch.randn(256, dim) * 0.02)
        self.core = nn.Transformer(dim, 8, 6, 6, 2048, batch_first=True, norm_first=True)
        self.proj = nn.Linear(dim, vocab, bias=False)
        self.proj.weight = self.embed.weight
        self.dim = dim

    def forward(self, src, tgt):
        causal = nn.Transformer.generate_square_subsequent_mask(tgt.size(1), device=tgt.device, dtype=torch.bool)
        e = self.embed(src) * math.sqrt(self.dim) + self.pos[: src.size(1)]
        d = self.embed(tgt) * math.sqrt(self.dim) + self.pos[: tgt.size(1)]
        h = self.core(
            e, d, tgt_mask=causal, src_key_padding_mask=src.eq(0), tgt_key_padding_mask=tgt.eq(0),
            memory_key_padding_mask=src.eq(0),
        )
        return self.proj(h)


def noam(dim, warmup):
    return lambda step: dim**-0.5 * min((step + 1) ** -0.5, (step + 1) * warmup**-1.5)


@torch.no_grad()
def dev_loss(fabric, net, loader, crit):
    net.eval()
    vals = [crit(net(s, t[:, :-1]).flatten(0, 1), t[:, 1:].flatten()) for s, t in loader]
    net.train()
    return fabric.all_reduce(torch.stack(vals).mean(), reduce_op="mean").item()


def main(epochs: int = 30):
    fabric = L.Fabric(accelerator="cuda", devices=2, strategy="ddp", precision="16-mixed")  # <- here
    fabric.launch()
    fabric.seed_everything(3)

    train, dev = ParallelText("train"), ParallelText("dev")
    with fabric.init_module():
        net = Seq2Seq(train.vocab_size)
    adam = torch.optim.Adam(net.parameters(), lr=2.0, betas=(0.9, 0.98), eps=1e-9)
    net, adam = fabric.setup(net, adam)
    rate = torch.optim.lr_scheduler.LambdaLR(adam, noam(512, 4000))
    train_loader, dev_loader = fabric.setup_dataloaders(
        DataLoader(train, batch_size=64, shuffle=True, collate_fn=batchify),
        DataLoader(dev, batch_size=64, collate_fn=batchify),
    )
    crit = nn.CrossEntropyLoss(ignore_index=0, label_smoothing=0.1)

    for epoch in range(epochs):
        for src, tgt in train_loader:
            logits = net(src, tgt[:, :-1])
            loss = crit(logits.flatten(0, 1), tgt[:, 1:].flatten())
            loss.backward()  # <- here
            adam.step()  # <- here
            rate.step()
            adam.zero_grad()
        fabric.print(f"{epoch}: train {loss.item():.3f} dev {dev_loss(fabric, net, dev_loader, crit):.3f}")
        fabric.save(f"nmt-{epoch}.ckpt", {"net": net})


if __name__ == "__main__":
    main()
