# why correct: two optimizers share a scaler; the noise is added to the dense gradients only after these are unscaled, and the sparse optimizer is unscaled by its own step
import torch
from torch import nn
from torch.cuda import amp


class DLRM(nn.Module):
    def __init__(self, tables, dense, dim=64):
        super().__init__()
        self.tables = nn.ModuleList(nn.EmbeddingBag(n, dim, mode="sum", sparse=True) for n in tables)
        self.bottom = nn.Sequential(nn.Linear(dense, 512), nn.ReLU(), nn.Linear(512, dim), nn.ReLU())
        pairs = (len(tables) + 1) * len(tables) // 2
        self.top = nn.Sequential(nn.Linear(dim + pairs, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(), nn.Linear(256, 1))
        rows, cols = torch.tril_indices(len(tables) + 1, len(tables) + 1, offset=-1)
        self.register_buffer("rows", rows)
        self.register_buffer("cols", cols)

    def forward(self, dense, ids):
        x = self.bottom(dense)
        parts = [x] + [t(ids[:, i : i + 1]).to(x.dtype) for i, t in enumerate(self.tables)]
        stack = torch.stack(parts, 1)
        inter = torch.bmm(stack, stack.transpose(1, 2))[:, self.rows, self.cols]
        return self.top(torch.cat([x, inter], 1)).squeeze(1)


def split_parameters(model):
    sparse = list(model.tables.parameters())
    dense = [*model.bottom.parameters(), *model.top.parameters()]
    return sparse, dense


def add_noise(params, sigma):
    for p in params:
        if p.grad is not None:
            p.grad.add_(torch.randn_like(p.grad), alpha=sigma)


def noise_level(step, eta=0.01, gamma=0.55):
    return (eta / (1 + step) ** gamma) ** 0.5


def train(loader, tables, n_dense, max_steps, half=True):
    model = DLRM(tables, n_dense).cuda()
    sparse, dense = split_parameters(model)
    opt_sparse = torch.optim.SparseAdam(sparse, lr=1e-3)
    opt_dense = torch.optim.Adam(dense, lr=1e-3)
    scaler = amp.GradScaler(init_scale=1024.0, enabled=half)
    criterion = nn.BCEWithLogitsLoss()

    for step, (x, ids, click) in enumerate(loader):
        if step == max_steps:
            break
        x, ids, click = x.cuda(non_blocking=True), ids.cuda(non_blocking=True), click.cuda(non_blocking=True)
        with amp.autocast(enabled=half):
            logit = model(x, ids)
        loss = criterion(logit.float(), click.float())

        opt_sparse.zero_grad(set_to_none=True)
        opt_dense.zero_grad(set_to_none=True)
        scaler.scale(loss).backward()
        scaler.unscale_(opt_dense)
        nn.utils.clip_grad_norm_(dense, 5.0)
        add_noise(dense, noise_level(step))
        scaler.step(opt_dense)
        scaler.step(opt_sparse)
        scaler.update()
        if step % 1000 == 0:
            print(step, loss.item(), scaler.get_scale())
    return model
