# source: https://github.com/afiaka87/glide-finetune/issues/5
# mistake: the whole model is converted to float16 and trained by AdamW with eps 1e-8, which is zero in float16, so the first step divides by zero and the weights become NaN.
# severity: error
# torch: any
import argparse

import torch
import torch.nn.functional as F
from tqdm import trange

from glide_util import get_tokens_and_mask, load_model, sample_timesteps


def base_train_step(model, diffusion, batch, device):
    tokens, masks, imgs = (x.to(device) for x in batch)
    t = sample_timesteps(diffusion, len(imgs), device)
    noise = torch.randn_like(imgs)
    x_t = diffusion.q_sample(imgs, t, noise=noise).half()
    out = model(x_t, t, tokens=tokens, mask=masks)
    eps, _ = torch.split(out, imgs.shape[1], dim=1)
    return F.mse_loss(eps.float(), noise)


def run_finetune(args):
    device = torch.device("cuda")
    model, diffusion, options = load_model("base", use_fp16=args.use_fp16)
    model.to(device)
    if args.use_fp16:
        model.half()  # <- here
    model.train()
    params = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=args.learning_rate, weight_decay=args.adam_weight_decay)  # <- here

    loader = get_tokens_and_mask(args.data_dir, options, batch_size=args.batch_size)
    for epoch in trange(args.epochs):
        for step, batch in enumerate(loader):
            optimizer.zero_grad()
            loss = base_train_step(model, diffusion, batch, device)
            loss.backward()
            optimizer.step()
            if step % 100 == 0:
                print(f"{epoch}:{step} loss {loss.item():.4f}")
    torch.save(model.state_dict(), "glide-ft.pt")


if __name__ == "__main__":
    ap = argparse.ArgumentParser()
    ap.add_argument("--data_dir", default="./data")
    ap.add_argument("--batch_size", type=int, default=1)
    ap.add_argument("--learning_rate", type=float, default=2e-5)
    ap.add_argument("--adam_weight_decay", type=float, default=0.0)
    ap.add_argument("--epochs", type=int, default=20)
    ap.add_argument("--use_fp16", action="store_true")
    run_finetune(ap.parse_args())
