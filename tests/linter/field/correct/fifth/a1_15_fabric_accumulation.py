# why correct: Fabric scales in fabric.backward and unscales in fabric.clip_gradients; no explicit autocast or scaler is needed and the sync is skipped except on the last micro-batch
import lightning as L
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader

from nerd.data import Spans, collate


class SpanTagger(nn.Module):
    def __init__(self, vocab, labels, dim=256):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim, padding_idx=0)
        self.rnn = nn.LSTM(dim, dim, 2, batch_first=True, bidirectional=True)
        self.out = nn.Linear(2 * dim, labels)

    def forward(self, ids):
        h, _ = self.rnn(self.emb(ids))
        return self.out(h)


def loss_of(model, batch):
    logits = model(batch["ids"])
    return F.cross_entropy(logits.flatten(0, 1), batch["tags"].flatten(), ignore_index=-1)


def main(accumulate=4, epochs=20):
    fabric = L.Fabric(accelerator="cuda", devices="auto", strategy="ddp", precision="16-mixed")
    fabric.launch()
    data = Spans("train")
    model = SpanTagger(data.vocab, data.labels)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(DataLoader(data, 32, shuffle=True, collate_fn=collate))

    for epoch in range(epochs):
        model.train()
        n = len(loader)
        for i, batch in enumerate(loader):
            final = (i + 1) % accumulate == 0 or i + 1 == n
            size = accumulate if i < n - n % accumulate else n % accumulate
            with fabric.no_backward_sync(model, enabled=not final):
                loss = loss_of(model, batch)
                fabric.backward(loss / size)
            if final:
                fabric.clip_gradients(model, optimizer, max_norm=1.0)
                optimizer.step()
                optimizer.zero_grad()
        fabric.save(f"tagger{epoch}.ckpt", {"model": model})
        fabric.print(epoch, loss.item())


if __name__ == "__main__":
    main()
