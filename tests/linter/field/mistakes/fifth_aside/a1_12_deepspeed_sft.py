# source: huggingface/transformers PR #9705 (issue #9694); deepspeedai/DeepSpeed issue #329
# mistake: backward is called on the loss tensor instead of the DeepSpeed engine, so with fp16 the loss is never scaled nor divided by the accumulation steps while engine.step() still unscales
# severity: error
import argparse

import deepspeed
import torch
from torch.utils.data import DataLoader, DistributedSampler
from transformers import AutoModelForCausalLM, AutoTokenizer

from sft.data import ChatDataset, pad_chat

DS = {
    "train_micro_batch_size_per_gpu": 2,
    "gradient_accumulation_steps": 16,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "initial_scale_power": 16, "loss_scale_window": 500},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.0}},
    "scheduler": {
        "type": "WarmupDecayLR",
        "params": {"warmup_num_steps": 100, "total_num_steps": 3000, "warmup_max_lr": 1e-5},
    },
}


def parse():
    p = argparse.ArgumentParser()
    p.add_argument("--model", default="EleutherAI/pythia-1.4b")
    p.add_argument("--chats", required=True)
    p.add_argument("--epochs", type=int, default=3)
    p.add_argument("--local_rank", type=int, default=-1)
    p.add_argument("--out", default="sft_ckpt")
    return p.parse_args()


def evaluate(engine, loader):
    engine.eval()
    total = torch.zeros(2, device=engine.device)
    with torch.no_grad():
        for batch in loader:
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            n = (batch["labels"][:, 1:] != -100).sum()
            total += torch.stack([engine(**batch).loss.float() * n, n.float()])
    torch.distributed.all_reduce(total)
    engine.train()
    return (total[0] / total[1]).item()


def main():
    args = parse()
    deepspeed.init_distributed()
    tok = AutoTokenizer.from_pretrained(args.model)
    tok.pad_token = tok.eos_token
    model = AutoModelForCausalLM.from_pretrained(args.model)
    model.gradient_checkpointing_enable()
    engine, _, _, _ = deepspeed.initialize(args=args, model=model, model_parameters=model.parameters(), config=DS)

    train, dev = ChatDataset(args.chats, tok, "train"), ChatDataset(args.chats, tok, "dev")
    sampler = DistributedSampler(train, shuffle=True)
    loader = DataLoader(train, batch_size=2, sampler=sampler, collate_fn=pad_chat, num_workers=2)
    dev_loader = DataLoader(dev, batch_size=4, sampler=DistributedSampler(dev, shuffle=False), collate_fn=pad_chat)

    for epoch in range(args.epochs):
        sampler.set_epoch(epoch)
        engine.train()
        for i, batch in enumerate(loader):
            batch = {k: v.to(engine.device, non_blocking=True) for k, v in batch.items()}
            loss = engine(**batch).loss
            loss.backward()  # <- here
            engine.step()  # <- here
            if i % 160 == 0 and engine.global_rank == 0:
                print(f"epoch {epoch} it {i} loss {loss.item():.3f}", flush=True)
        score = evaluate(engine, dev_loader)
        engine.save_checkpoint(args.out, tag=f"epoch{epoch}", client_state={"dev_loss": score})


if __name__ == "__main__":
    main()
