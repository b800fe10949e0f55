# source: h2oai/h2o-llmstudio issue #628 (pytorch/pytorch issue #127176)
# mistake: a GradScaler is enabled for a model whose parameters are bfloat16; unscaling its bfloat16 gradients raises "_amp_foreach_non_finite_check_and_unscale_cuda not implemented for 'BFloat16'"
# severity: error
from typing import Any

import torch
from torch.utils.data import DataLoader
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

CONFIG: dict[str, Any] = {
    "architecture": {"backbone": "h2oai/h2o-danube2-1.8b-base", "dtype": torch.bfloat16, "checkpointing": True},  # <- here
    "training": {"lr": 1e-5, "epochs": 1, "batch_size": 4, "accumulate": 4, "clip": 0.5},
    "environment": {"device": "cuda:0", "mixed_precision": True, "workers": 4},
}


def build(cfg):
    arch = cfg["architecture"]
    tok = AutoTokenizer.from_pretrained(arch["backbone"])
    net = AutoModelForCausalLM.from_pretrained(arch["backbone"], torch_dtype=arch["dtype"])  # <- here
    if arch["checkpointing"]:
        net.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    return tok, net.to(cfg["environment"]["device"])


def tokenizing(tok):
    def fn(rows):
        enc = tok([r["instruction"] + r["answer"] for r in rows], padding=True, truncation=True, return_tensors="pt")
        enc["labels"] = enc.input_ids.masked_fill(enc.attention_mask.eq(0), -100)
        return enc

    return fn


def run_train(cfg, rows):
    tr, env = cfg["training"], cfg["environment"]
    tok, net = build(cfg)
    loader = DataLoader(
        rows, tr["batch_size"], shuffle=True, drop_last=True, collate_fn=tokenizing(tok), num_workers=env["workers"]
    )
    optimizer = torch.optim.Adam(net.parameters(), lr=tr["lr"])
    scaler = torch.amp.GradScaler("cuda", enabled=env["mixed_precision"])  # <- here

    losses = []
    for epoch in range(tr["epochs"]):
        net.train()
        bar = tqdm(loader, desc=f"epoch {epoch}")
        usable = len(loader) - len(loader) % tr["accumulate"]
        for i, batch in enumerate(bar):
            if i >= usable:
                break
            batch = batch.to(env["device"])
            with torch.autocast("cuda", dtype=cfg["architecture"]["dtype"], enabled=env["mixed_precision"]):
                loss = net(**batch).loss
            losses.append(loss.item())
            scaler.scale(loss / tr["accumulate"]).backward()
            if (i + 1) % tr["accumulate"] == 0:
                scaler.unscale_(optimizer)  # <- here
                torch.nn.utils.clip_grad_norm_(net.parameters(), tr["clip"])
                scaler.step(optimizer)
                scaler.update()
                optimizer.zero_grad(set_to_none=True)
                bar.set_postfix(loss=sum(losses[-20:]) / len(losses[-20:]))
    net.save_pretrained("danube-tuned")
    return losses


if __name__ == "__main__":
    from datasets import load_dataset

    run_train(CONFIG, load_dataset("json", data_files="instructions.jsonl", split="train"))
