# source: matanbt/TROPT pull request #8 (same: afiaka87/glide-finetune pull request #6)
# mistake: the soft prompt is a float16 parameter stepped directly by Adam with eps=1e-8; squared gradients and eps both become zero in float16 and the first step gives inf/NaN
# severity: error
import argparse

import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoModelForCausalLM, AutoTokenizer


class SoftPrompt(nn.Module):
    def __init__(self, table: nn.Embedding, length: int):
        super().__init__()
        pick = torch.randperm(table.num_embeddings, device=table.weight.device)[:length]
        self.vectors = nn.Parameter(table.weight[pick].detach().clone().to(torch.float16))  # <- here

    def prepend(self, embeds, mask):
        b = embeds.size(0)
        soft = self.vectors.unsqueeze(0).expand(b, -1, -1)
        ones = mask.new_ones(b, self.vectors.size(0))
        return torch.cat([soft, embeds], 1), torch.cat([ones, mask], 1)


def batches(pairs, tok, size, device):
    for i in range(0, len(pairs), size):
        chunk = pairs[i:i + size]
        text = [q + "\n" + a + tok.eos_token for q, a in chunk]
        enc = tok(text, return_tensors="pt", padding=True, truncation=True, max_length=512).to(device)
        labels = enc.input_ids.masked_fill(enc.attention_mask == 0, -100)
        for row, (q, _) in enumerate(chunk):
            labels[row, : len(tok(q + "\n").input_ids)] = -100
        yield enc.input_ids, enc.attention_mask, labels


def prompt_loss(lm, prompt, ids, mask, labels):
    embeds, mask = prompt.prepend(lm.get_input_embeddings()(ids), mask)
    logits = lm(inputs_embeds=embeds, attention_mask=mask).logits
    pad = labels.new_full((labels.size(0), prompt.vectors.size(0)), -100)
    labels = torch.cat([pad, labels], 1)
    return F.cross_entropy(logits[:, :-1].float().flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100)


def tune(lm, tok, pairs, length=20, lr=3e-3, epochs=5, size=8):
    lm.requires_grad_(False)
    prompt = SoftPrompt(lm.get_input_embeddings(), length)
    opt = torch.optim.Adam(prompt.parameters(), lr=lr, eps=1e-8)  # <- here
    warm = torch.optim.lr_scheduler.LinearLR(opt, 0.1, total_iters=100)
    for epoch in range(epochs):
        total, n = 0.0, 0
        for ids, mask, labels in batches(pairs, tok, size, lm.device):
            loss = prompt_loss(lm, prompt, ids, mask, labels)
            opt.zero_grad()
            loss.backward()
            opt.step()  # <- here
            warm.step()
            total += loss.item()
            n += 1
        print(f"epoch {epoch} loss {total / n:.4f}")
    return prompt


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--lm", default="facebook/opt-1.3b")
    ap.add_argument("--tsv", required=True)
    ap.add_argument("--length", type=int, default=20)
    a = ap.parse_args()

    tok = AutoTokenizer.from_pretrained(a.lm)
    tok.padding_side = "right"
    lm = AutoModelForCausalLM.from_pretrained(a.lm, torch_dtype=torch.float16).cuda().eval()
    with open(a.tsv) as fh:
        pairs = [tuple(line.rstrip("\n").split("\t")[:2]) for line in fh if "\t" in line]
    prompt = tune(lm, tok, pairs, a.length)
    torch.save(prompt.state_dict(), "soft_prompt.pt")


if __name__ == "__main__":
    main()
