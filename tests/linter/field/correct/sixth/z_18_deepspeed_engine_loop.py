# why correct: with the DeepSpeed engine, scaling, accumulation, clipping, zeroing and scheduling are all done by engine.backward/engine.step, and the engine's own checkpoint holds the scaler
import argparse

import deepspeed
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer

DS = {
    "train_micro_batch_size_per_gpu": 4,
    "gradient_accumulation_steps": 8,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 500, "hysteresis": 2},
    "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True},
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-5, "betas": [0.9, 0.95], "weight_decay": 0.0}},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_min_lr": 0, "warmup_max_lr": 1e-5, "warmup_num_steps": 200}},
}


def logprobs(engine, ids, mask, answer):
    logits = engine(input_ids=ids, attention_mask=mask).logits[:, :-1].float()
    lp = torch.gather(logits.log_softmax(-1), 2, ids[:, 1:, None]).squeeze(-1)
    return (lp * answer[:, 1:]).sum(-1)


def dpo_loss(policy, reference, batch, beta):
    ids, mask, answer = batch["ids"], batch["mask"], batch["answer"].float()
    with torch.no_grad():
        ref = logprobs(reference, ids, mask, answer)
    pol = logprobs(policy, ids, mask, answer)
    margin = pol - ref
    chosen, rejected = margin.chunk(2)
    loss = -F.logsigmoid(beta * (chosen - rejected)).mean()
    return loss, (chosen > rejected).float().mean()


def main():
    ap = argparse.ArgumentParser()
    ap.add_argument("--model", required=True)
    ap.add_argument("--pairs", required=True)
    ap.add_argument("--beta", type=float, default=0.1)
    ap.add_argument("--local_rank", type=int, default=-1)
    ap.add_argument("--save", default="dpo")
    ap.add_argument("--load")
    a = ap.parse_args()
    deepspeed.init_distributed()

    from preference import PairDataset

    tok = AutoTokenizer.from_pretrained(a.model)
    model = AutoModelForCausalLM.from_pretrained(a.model)
    model.gradient_checkpointing_enable()
    reference = AutoModelForCausalLM.from_pretrained(a.model, torch_dtype=torch.float16).eval().cuda().requires_grad_(False)
    data = PairDataset(a.pairs, tok)
    engine, _, loader, _ = deepspeed.initialize(model=model, model_parameters=model.parameters(), training_data=data,
                                                collate_fn=data.collate, config=DS)
    if a.load:
        engine.load_checkpoint(a.load)
    engine.train()
    for epoch in range(2):
        for batch in loader:
            batch = {k: v.to(engine.device) for k, v in batch.items()}
            loss, acc = dpo_loss(engine, reference, batch, a.beta)
            engine.backward(loss)
            engine.step()
            if engine.global_rank == 0 and engine.micro_steps % 80 == 0:
                print(engine.global_steps, loss.item(), acc.item())
        engine.save_checkpoint(a.save, tag=f"epoch{epoch}")


if __name__ == "__main__":
    main()
