"""Decodes with a tiny GPT-2 of random weights; each call after the first takes the cache of the one before.

ampaudit record --module model -o calls/ examples/recording/generate.py --tokens 8
ampaudit scan examples/recording/generate.py:tiny_gpt2 --inputs calls/
"""

from __future__ import annotations

import argparse

import torch
from transformers import GPT2Config, GPT2LMHeadModel


def tiny_gpt2() -> GPT2LMHeadModel:
    torch.manual_seed(0)
    sizes = {"n_layer": 2, "n_head": 2, "n_embd": 32, "n_positions": 64, "vocab_size": 100}
    return GPT2LMHeadModel(GPT2Config(**sizes, bos_token_id=0, eos_token_id=99)).eval()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--tokens", type=int, default=8)
    tokens = parser.parse_args().tokens
    model = tiny_gpt2()
    prompt = torch.tensor([[0, 12, 5, 33]])
    found = model.generate(prompt, max_new_tokens=tokens, do_sample=False, pad_token_id=99)
    print(found.tolist())


if __name__ == "__main__":
    main()
