import torch.nn.functional as F
from lightning.fabric import Fabric


def main(model, optimizer, loader):
    fabric = Fabric(accelerator="cuda", precision="16-mixed", devices=2)
    fabric.launch()
    model, optimizer = fabric.setup(model, optimizer)
    loader = fabric.setup_dataloaders(loader)
    model.train()
    for i, (x, y) in enumerate(loader):
        is_accumulating = i % 4 != 0
        with fabric.no_backward_sync(model, enabled=is_accumulating):
            loss = F.cross_entropy(model(x), y)
            fabric.backward(loss / 4)
        if not is_accumulating:
            fabric.clip_gradients(model, optimizer, max_norm=1.0)
            optimizer.step()
            optimizer.zero_grad()
        if i % 100 == 0:
            fabric.print(loss.item())
    fabric.save("checkpoint.ckpt", {"model": model, "optimizer": optimizer})
