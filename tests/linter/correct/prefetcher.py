import torch


class DataPrefetcher:
    def __init__(self, loader, fp16=False):
        self.loader = iter(loader)
        self.stream = torch.cuda.Stream()
        self.fp16 = fp16
        self.preload()

    def preload(self):
        try:
            self.next_input, self.next_target = next(self.loader)
        except StopIteration:
            self.next_input = self.next_target = None
            return
        with torch.cuda.stream(self.stream):
            self.next_input = self.next_input.cuda(non_blocking=True)
            self.next_input = self.next_input.half() if self.fp16 else self.next_input.float()

    def next(self):
        torch.cuda.current_stream().wait_stream(self.stream)
        item = self.next_input, self.next_target
        self.preload()
        return item


def train(model, loader, optimizer, criterion):
    scaler = torch.amp.GradScaler("cuda")
    prefetcher = DataPrefetcher(loader)
    x, y = prefetcher.next()
    while x is not None:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = criterion(model(x), y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
        x, y = prefetcher.next()
