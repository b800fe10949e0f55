# source: locuslab/open-unlearning#156
# mistake: bfloat16 tensors are converted with .numpy(), which raises because NumPy has no bfloat16
# severity: error
import argparse

import numpy as np
import torch
import torch.nn.functional as F
from sklearn.linear_model import LogisticRegression
from transformers import AutoModelForCausalLM, AutoTokenizer


def load(name):
    tok = AutoTokenizer.from_pretrained(name)
    tok.pad_token = tok.eos_token
    tok.padding_side = "right"
    lm = AutoModelForCausalLM.from_pretrained(name, torch_dtype=torch.bfloat16, device_map="cuda")
    return tok, lm.eval()


def batches(seq, n):
    for i in range(0, len(seq), n):
        yield seq[i:i + n]


@torch.no_grad()
def pooled_states(tok, lm, texts, layer, size=8):
    rows = []
    for chunk in batches(texts, size):
        enc = tok(chunk, return_tensors="pt", padding=True, truncation=True, max_length=512).to(lm.device)
        hidden = lm(**enc, output_hidden_states=True).hidden_states[layer]
        last = enc["attention_mask"].sum(1) - 1
        vec = hidden[torch.arange(len(chunk), device=hidden.device), last]
        rows.append(vec.cpu().numpy())  # <- here
    return np.concatenate(rows)


@torch.no_grad()
def answer_nll(tok, lm, texts, size=8):
    out = []
    for chunk in batches(texts, size):
        enc = tok(chunk, return_tensors="pt", padding=True).to(lm.device)
        logits = lm(**enc).logits[:, :-1].float()
        target = enc["input_ids"][:, 1:].masked_fill(enc["attention_mask"][:, 1:] == 0, -100)
        nll = F.cross_entropy(logits.transpose(1, 2), target, ignore_index=-100, reduction="none")
        out.extend((nll.sum(1) / (target != -100).sum(1)).tolist())
    return out


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--layer", type=int, default=-4)
    ap.add_argument("--forget", required=True)
    ap.add_argument("--retain", required=True)
    a = ap.parse_args()
    tok, lm = load(a.model)
    forget = open(a.forget).read().splitlines()
    retain = open(a.retain).read().splitlines()
    X = np.vstack([pooled_states(tok, lm, forget, a.layer), pooled_states(tok, lm, retain, a.layer)])
    y = np.r_[np.ones(len(forget)), np.zeros(len(retain))]
    order = np.random.default_rng(0).permutation(len(y))
    cut = int(0.8 * len(y))
    probe = LogisticRegression(max_iter=1000).fit(X[order[:cut]], y[order[:cut]])
    print("probe", probe.score(X[order[cut:]], y[order[cut:]]))
    print("nll forget", np.mean(answer_nll(tok, lm, forget)))
    print("nll retain", np.mean(answer_nll(tok, lm, retain)))


if __name__ == "__main__":
    main()
