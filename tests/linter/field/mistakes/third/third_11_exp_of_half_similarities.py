import argparse
import math

import open_clip
import torch
import torch.nn as nn
import torch.nn.functional as F
from torch.utils.data import DataLoader
from torchvision.datasets import CocoCaptions


class PairedCaptions(torch.utils.data.Dataset):
    def __init__(self, root, ann, preprocess, tokenizer):
        self.base = CocoCaptions(root, ann)
        self.preprocess, self.tokenizer = preprocess, tokenizer

    def __len__(self):
        return len(self.base)

    def __getitem__(self, i):
        image, captions = self.base[i]
        pick = torch.randint(len(captions), (1,)).item()
        return self.preprocess(image), self.tokenizer(captions[pick])[0]


def contrastive_loss(img, txt, logit_scale):
    sim = torch.exp(logit_scale * (img @ txt.t()))  # <- here
    pos = sim.diagonal()
    loss_i = -torch.log(pos / sim.sum(dim=1))
    loss_t = -torch.log(pos / sim.sum(dim=0))
    return 0.5 * (loss_i.mean() + loss_t.mean())


def cosine_lr(step, warmup, total):
    if step < warmup:
        return (step + 1) / warmup
    return 0.5 * (1 + math.cos(math.pi * (step - warmup) / max(1, total - warmup)))


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--images", default="/data/coco/train2017")
    parser.add_argument("--ann", default="/data/coco/annotations/captions_train2017.json")
    parser.add_argument("--epochs", type=int, default=10)
    parser.add_argument("--batch-size", type=int, default=256)
    parser.add_argument("--lr", type=float, default=1e-5)
    args = parser.parse_args()

    model, preprocess, _ = open_clip.create_model_and_transforms("ViT-B-32", pretrained="laion2b_s34b_b79k")
    model = model.cuda()
    tokenizer = open_clip.get_tokenizer("ViT-B-32")
    data = PairedCaptions(args.images, args.ann, preprocess, tokenizer)
    loader = DataLoader(data, args.batch_size, shuffle=True, num_workers=8, drop_last=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.98), eps=1e-6, weight_decay=0.2)
    total = args.epochs * len(loader)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda s: cosine_lr(s, 500, total))
    scaler = torch.amp.GradScaler("cuda")

    for epoch in range(args.epochs):
        model.train()
        for step, (images, texts) in enumerate(loader):
            images, texts = images.cuda(non_blocking=True), texts.cuda(non_blocking=True)
            optimizer.zero_grad(set_to_none=True)
            with torch.autocast("cuda", dtype=torch.float16):
                img = F.normalize(model.encode_image(images), dim=-1)
                txt = F.normalize(model.encode_text(texts), dim=-1)
            loss = contrastive_loss(img.half(), txt.half(), model.logit_scale.exp().half())
            scaler.scale(loss).backward()
            scaler.unscale_(optimizer)
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            scaler.step(optimizer)
            scaler.update()
            scheduler.step()
            with torch.no_grad():
                model.logit_scale.clamp_(0, math.log(100))
            if step % 50 == 0:
                print(f"{epoch}/{step} loss {loss.item():.4f} temp {model.logit_scale.exp().item():.2f}")
        torch.save({"model": model.state_dict(), "scaler": scaler.state_dict()}, f"clip_{epoch}.pt")


if __name__ == "__main__":
    main()
