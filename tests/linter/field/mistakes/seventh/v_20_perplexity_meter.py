# source: pytorch/xla PR #2425 https://github.com/pytorch/xla/pull/2425
# mistake: token counts and loss sums of the evaluation are accumulated in a bfloat16 tensor, which stops growing once it is large
# severity: warning
import math

import torch
import torch.nn as nn
import torch.nn.functional as F


class CausalLM(nn.Module):
    def __init__(self, vocab=32000, dim=768, depth=6):
        super().__init__()
        self.emb = nn.Embedding(vocab, dim)
        self.pos = nn.Embedding(2048, dim)
        layer = nn.TransformerEncoderLayer(dim, 12, 4 * dim, batch_first=True, norm_first=True, activation="gelu")
        self.body = nn.TransformerEncoder(layer, depth)
        self.out = nn.Linear(dim, vocab, bias=False)

    def forward(self, ids):
        n = ids.size(1)
        x = self.emb(ids) + self.pos(torch.arange(n, device=ids.device))
        mask = nn.Transformer.generate_square_subsequent_mask(n, device=ids.device)
        return self.out(self.body(x, mask=mask, is_causal=True))


def token_loss(model, ids, reduction):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(ids[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), ids[:, 1:].flatten(), ignore_index=0, reduction=reduction)


@torch.no_grad()
def perplexity(model, loader):
    model.eval()
    nll = torch.zeros((), device="cuda", dtype=torch.bfloat16)  # <- here
    count = torch.zeros((), device="cuda", dtype=torch.bfloat16)  # <- here
    for ids in loader:
        ids = ids.cuda()
        nll += token_loss(model, ids, "sum")  # <- here
        count += (ids[:, 1:] != 0).sum()  # <- here
    model.train()
    return math.exp((nll / count).item())


def main(train, val, steps=20_000):
    model = CausalLM().cuda()
    opt = torch.optim.AdamW(model.parameters(), lr=3e-4, fused=True)
    best = math.inf
    for step, ids in zip(range(steps), train):
        loss = token_loss(model, ids.cuda(), "mean")
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        opt.step()
        opt.zero_grad(set_to_none=True)
        if (step + 1) % 1000 == 0:
            ppl = perplexity(model, val)
            print(f"step {step + 1} loss {loss.item():.3f} ppl {ppl:.2f}")
            if ppl < best:
                best = ppl
                torch.save(model.state_dict(), "best_lm.pt")


if __name__ == "__main__":
    from wiki import train_stream, val_batches

    main(train_stream(), val_batches())
