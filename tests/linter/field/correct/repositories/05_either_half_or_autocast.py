# source: the tests of FSDP in PyTorch, re-expressed: a caller sets one of the two switches
import torch
from torch.nn.parallel import DistributedDataParallel


class Parity:
    def _steps(self, model, batches, *, autocast, pure_half):
        scaler = torch.amp.GradScaler("cuda", enabled=autocast)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        for x in batches:
            with torch.autocast("cuda", enabled=autocast):
                if pure_half:
                    x = x.half()
                output = model(x)
                loss = output.float().sum()
            optimizer.zero_grad()
            scaler.scale(loss).backward()
            scaler.step(optimizer)
            scaler.update()
        return loss.detach()

    def check(self, make_model, batches, mixed_precision=None, use_pure_fp16=False):
        model = DistributedDataParallel(make_model().cuda())
        if use_pure_fp16:
            model = model.half()
        return self._steps(model, batches, autocast=mixed_precision is not None, pure_half=use_pure_fp16)
