import os
from contextlib import ExitStack

import torch
import torch.distributed as dist
import torch.nn as nn
from torch.nn.parallel import DistributedDataParallel as DDP
from torch.utils.data import DataLoader, DistributedSampler
from torchvision.datasets import CocoDetection
from torchvision.models.detection import retinanet_resnet50_fpn_v2
from torchvision.transforms.functional import to_tensor

ACCUM = 4
WEIGHTS = {"classification": 1.0, "bbox_regression": 2.0}


def prepare(image, anns):
    boxes = torch.tensor([a["bbox"] for a in anns], dtype=torch.float32).view(-1, 4)
    boxes[:, 2:] += boxes[:, :2]
    keep = (boxes[:, 2] > boxes[:, 0]) & (boxes[:, 3] > boxes[:, 1])
    labels = torch.tensor([a["category_id"] for a in anns], dtype=torch.int64)
    return to_tensor(image), {"boxes": boxes[keep], "labels": labels[keep]}


def collate(batch):
    return tuple(zip(*batch))


def lr_at(step, warmup=1000, decay=(60000, 80000)):
    if step < warmup:
        return (step + 1) / warmup
    return 0.1 ** sum(step >= d for d in decay)


def main():
    dist.init_process_group("nccl")
    rank = int(os.environ["LOCAL_RANK"])
    torch.cuda.set_device(rank)
    data = CocoDetection("/data/coco/train2017", "/data/coco/annotations/instances_train2017.json", transforms=prepare)
    sampler = DistributedSampler(data)
    loader = DataLoader(data, 4, sampler=sampler, num_workers=4, collate_fn=collate, drop_last=True)
    net = nn.SyncBatchNorm.convert_sync_batchnorm(retinanet_resnet50_fpn_v2(num_classes=91)).cuda(rank)
    model = DDP(net, device_ids=[rank])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, weight_decay=1e-4)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lr_at)
    scaler = torch.amp.GradScaler("cuda")
    model.train()
    for epoch in range(12):
        sampler.set_epoch(epoch)
        n_batches = len(loader)
        for i, (images, targets) in enumerate(loader):
            images = [im.cuda(rank, non_blocking=True) for im in images]
            targets = [{k: v.cuda(rank) for k, v in t.items()} for t in targets]
            window_start = i - i % ACCUM
            window = min(ACCUM, n_batches - window_start)
            boundary = i + 1 == window_start + window
            with ExitStack() as stack:
                if not boundary:
                    stack.enter_context(model.no_sync())
                with torch.autocast("cuda", dtype=torch.float16):
                    losses = model(images, targets)
                total = sum(WEIGHTS[k] * v.float() for k, v in losses.items())
                scaler.scale(total / window).backward()
            if not boundary:
                continue
            scaler.unscale_(optimizer)
            norm = nn.utils.clip_grad_norm_(model.parameters(), 10.0, error_if_nonfinite=False)
            scaler.step(optimizer)
            old_scale = scaler.get_scale()
            scaler.update()
            optimizer.zero_grad(set_to_none=True)
            if scaler.get_scale() >= old_scale:
                scheduler.step()
            if rank == 0 and i % 200 == ACCUM - 1:
                print(f"epoch {epoch} iter {i} loss {total.item():.4f} norm {norm.item():.2f}")
        if rank == 0:
            torch.save({"model": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch": epoch,
                        "scheduler": scheduler.state_dict(), "scaler": scaler.state_dict()}, f"retina_{epoch}.pt")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
