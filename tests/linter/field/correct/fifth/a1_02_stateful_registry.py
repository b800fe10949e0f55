# why correct: the scaler is one of the registered stateful objects, so the generic save and resume loops carry its state although no line names scaler.state_dict()
import argparse
import pathlib

import torch
import torch.nn.functional as F

from charlm import CharTransformer, text_batches


class Checkpointer:
    def __init__(self, folder, **objects):
        self.folder = pathlib.Path(folder)
        self.folder.mkdir(parents=True, exist_ok=True)
        self.objects = objects

    def write(self, step):
        blob = {name: obj.state_dict() for name, obj in self.objects.items()}
        blob["step"] = step
        tmp = self.folder / "tmp.pt"
        torch.save(blob, tmp)
        tmp.rename(self.folder / f"step{step:08d}.pt")

    def newest(self):
        found = sorted(self.folder.glob("step*.pt"))
        return found[-1] if found else None

    def read(self):
        path = self.newest()
        if path is None:
            return 0
        blob = torch.load(path, map_location="cpu")
        for name, obj in self.objects.items():
            obj.load_state_dict(blob[name])
        return blob["step"] + 1


def main():
    p = argparse.ArgumentParser()
    p.add_argument("--folder", default="runs/char")
    p.add_argument("--steps", type=int, default=100_000)
    p.add_argument("--half", action=argparse.BooleanOptionalAction, default=True)
    a = p.parse_args()

    net = CharTransformer().cuda()
    adam = torch.optim.AdamW(net.parameters(), lr=1e-3, betas=(0.9, 0.99))
    cosine = torch.optim.lr_scheduler.CosineAnnealingLR(adam, a.steps)
    loss_scale = torch.amp.GradScaler("cuda", enabled=a.half)
    ckpt = Checkpointer(a.folder, net=net, adam=adam, cosine=cosine, loss_scale=loss_scale)

    begin = ckpt.read()
    for step, (x, y) in enumerate(text_batches(skip=begin), start=begin):
        if step >= a.steps:
            break
        x, y = x.cuda(), y.cuda()
        with torch.autocast("cuda", torch.float16, enabled=a.half):
            loss = F.cross_entropy(net(x).flatten(0, 1), y.flatten())
        loss_scale.scale(loss).backward()
        loss_scale.step(adam)
        loss_scale.update()
        adam.zero_grad()
        cosine.step()
        if step % 1000 == 999:
            print(step, loss.item())
            ckpt.write(step)


if __name__ == "__main__":
    main()
