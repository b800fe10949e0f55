"""
# style of: EleutherAI/gpt-neox:megatron/training.py (reduced to one engine)
# correct: engine.backward scales and divides for accumulation, engine.step clips, steps and schedules; the loop adds neither a scaler nor a division and reads the overflow flag only.
# torch: 1.13+ (DeepSpeed)
"""
import deepspeed
import torch
import torch.nn.functional as F

from neox_mini import GPT2, batches, cosine_with_warmup

CONFIG = {
    "train_batch_size": 256,
    "train_micro_batch_size_per_gpu": 4,
    "gradient_clipping": 1.0,
    "fp16": {"enabled": True, "loss_scale": 0, "loss_scale_window": 1000, "hysteresis": 2, "min_loss_scale": 1},
    "zero_optimization": {"stage": 1, "overlap_comm": True},
}


def setup(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=6e-4, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    engine, optimizer, _, lr_scheduler = deepspeed.initialize(
        model=model,
        optimizer=optimizer,
        lr_scheduler=cosine_with_warmup(optimizer, warmup=2000, total=143_000),
        config=CONFIG,
    )
    return engine, optimizer, lr_scheduler


def forward_step(engine, tokens):
    logits = engine(tokens[:, :-1])
    return F.cross_entropy(logits.float().flatten(0, 1), tokens[:, 1:].flatten())


def train_step(engine, data):
    losses = []
    for _ in range(engine.gradient_accumulation_steps()):
        loss = forward_step(engine, next(data).to(engine.device))
        engine.backward(loss)
        engine.step()  # a no-op but for the counter until the window is full
        losses.append(loss.detach())
    skipped = bool(getattr(engine.optimizer, "overflow", False))
    return torch.stack(losses).mean(), skipped


def main():
    deepspeed.init_distributed()
    engine, optimizer, lr_scheduler = setup(GPT2(layers=12, hidden=768))
    data = iter(batches("pile", micro_batch=CONFIG["train_micro_batch_size_per_gpu"]))
    _, client = engine.load_checkpoint("ckpt")
    iteration = client["iteration"] if client else 0
    num_skipped = 0
    engine.train()
    while iteration < 143_000:
        loss, skipped = train_step(engine, data)
        iteration += 1
        num_skipped += skipped
        if iteration % 10 == 0 and torch.distributed.get_rank() == 0:
            norm = engine.get_global_grad_norm()
            print(f"{iteration} loss {loss.item():.3f} norm {norm} scale {optimizer.cur_scale} skipped {num_skipped}")
        if iteration % 1000 == 0:
            engine.save_checkpoint("ckpt", client_state={"iteration": iteration})


if __name__ == "__main__":
    main()
