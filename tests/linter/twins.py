"""A second pair for every code, in another style than its page: classes, helpers, flags."""

from __future__ import annotations

from textwrap import dedent, indent

# what is in <> is replaced by the body of the case
TRAINER = """
import torch
import torch.nn.functional as F
from torch import nn


class Trainer:
    def __init__(self, model, loader, accumulate=4):
        self.model, self.loader, self.accumulate = model, loader, accumulate
        self.opt = torch.optim.AdamW(self.model.parameters(), lr=3e-4)
        self.grad_scaler = torch.amp.GradScaler("cuda")

    def loss_of(self, batch):
        with torch.autocast("cuda", dtype=torch.float16):
            return F.cross_entropy(self.model(batch["x"]), batch["y"])

    def fit(self, epochs):
        for _ in range(epochs):
            for i, batch in enumerate(self.loader):
<>
"""
HELPERS = """
import torch
import torch.nn.functional as F
from torch.nn.utils import clip_grad_norm_


def finish(scaler, optimizer, model):
<>


def main(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    for x, y in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        finish(scaler, optimizer, model)


if __name__ == "__main__":
    main(None, [])
"""
FLAG = """
import torch
import torch.nn.functional as F


def train(args, model, optimizer, loader):
    scaler = torch.amp.GradScaler("cuda", enabled=args.amp)
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16, enabled=args.amp):
            loss = F.cross_entropy(model(x), y)
        if args.amp:
<>
        else:
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
"""
PLAIN = "<>"

STEP = "self.grad_scaler.step(self.opt)\nself.grad_scaler.update()\nself.opt.zero_grad()"
LOOP = "loss = self.loss_of(batch)\nself.grad_scaler.scale(loss).backward()"
_FINISH = "scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()"
_GATE = "if (i + 1) % self.accumulate == 0:\n    "
_MODULE = """
import torch
import torch.nn.functional as F
from torch import nn


class Net(nn.Module):
    def forward(self, x, mask):
        {}
        return x


def predict(x, mask):
    model = Net()
    with torch.autocast("cuda", dtype=torch.float16):
        return model(x, mask)
"""


def _gated(body: str) -> str:
    return "if (i + 1) % self.accumulate == 0:\n" + indent(body, "    ")


def script_of(*lines: str) -> str:
    return "import torch\nimport torch.nn.functional as F\nfrom torch import nn\n\n\n" + "\n".join(lines)


def _train(*body: str, before: tuple[str, ...] = (), arguments: str = "model, optimizer, loader") -> str:
    setup = ['scaler = torch.amp.GradScaler("cuda")', *before] if "scaler" not in " ".join(before) else before
    inside = "\n".join([*setup, "for x, y in loader:", indent("\n".join(body), "    ")])
    return script_of(f"def train({arguments}):", indent(inside, "    "))


_FORWARD = 'with torch.autocast("cuda", dtype=torch.float16):\n    loss = F.cross_entropy(model(x), y)'
_BACK = "scaler.scale(loss).backward()"
_DONE = "scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()"

# code: template, bad, good
TWINS: dict[str, tuple[str, str, str]] = {
    "AMP801": (
        PLAIN,
        script_of(
            "def main(loader):",
            "    model = nn.Sequential(nn.Linear(4, 4)).to('cuda')",
            "    model = model.to(dtype=torch.float16)",
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
            "    scaler = torch.amp.GradScaler('cuda')",
            "    for x, y in loader:",
            "        loss = F.mse_loss(model(x), y)",
            "        scaler.scale(loss).backward()",
            "        scaler.unscale_(optimizer)",
            indent(_DONE, "        "),
        ),
        script_of(
            "def main(loader):",
            "    model = nn.Sequential(nn.Linear(4, 4)).to('cuda')",
            "    model = model.to(dtype=torch.float16).float()",
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)",
            "    scaler = torch.amp.GradScaler('cuda')",
            "    for x, y in loader:",
            "        loss = F.mse_loss(model(x), y)",
            "        scaler.scale(loss).backward()",
            "        scaler.unscale_(optimizer)",
            indent(_DONE, "        "),
        ),
    ),
    "AMP802": (TRAINER, f"self.loss_of(batch).backward()\n{STEP}", f"{LOOP}\n{STEP}"),
    "AMP803": (
        HELPERS,
        "optimizer.step()\nscaler.update()\noptimizer.zero_grad()",
        _FINISH,
    ),
    "AMP804": (
        TRAINER,
        f"{LOOP}\nself.grad_scaler.step(self.opt)\nself.opt.zero_grad()",
        f"{LOOP}\n{STEP}",
    ),
    "AMP806 before the step": (
        HELPERS,
        "scaler.update()\nscaler.step(optimizer)\noptimizer.zero_grad()",
        _FINISH,
    ),
    "AMP806": (
        PLAIN,
        _train(
            _FORWARD,
            _BACK,
            "scaler.step(opt_a)\nscaler.update()\nscaler.step(opt_b)\nscaler.update()\nmodel.zero_grad()",
            arguments="model, opt_a, opt_b, loader",
        ),
        _train(
            _FORWARD,
            _BACK,
            "scaler.step(opt_a)\nscaler.step(opt_b)\nscaler.update()\nmodel.zero_grad()",
            arguments="model, opt_a, opt_b, loader",
        ),
    ),
    "AMP807": (
        FLAG,
        "            scaler.scale(loss).backward()\n"
        "            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)\n"
        "            scaler.step(optimizer)\n            scaler.update()",
        "            scaler.scale(loss).backward()\n            scaler.unscale_(optimizer)\n"
        "            torch.nn.utils.clip_grad_value_(model.parameters(), 0.5)\n"
        "            scaler.step(optimizer)\n            scaler.update()",
    ),
    "AMP808": (
        HELPERS,
        "norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\nprint(norm)\n" + _FINISH,
        "scaler.unscale_(optimizer)\n"
        "norm = torch.stack([p.grad.norm() for p in model.parameters()]).norm()\nprint(norm)\n" + _FINISH,
    ),
    "AMP809": (
        HELPERS,
        "scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)\nscaler.unscale_(optimizer)\n"
        + _FINISH,
        "scaler.unscale_(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)\n" + _FINISH,
    ),
    "AMP810": (
        TRAINER,
        "loss = self.loss_of(batch) / self.accumulate\nself.grad_scaler.scale(loss).backward()\n"
        "self.grad_scaler.unscale_(self.opt)\n" + _gated(STEP),
        "loss = self.loss_of(batch) / self.accumulate\nself.grad_scaler.scale(loss).backward()\n"
        + _gated("self.grad_scaler.unscale_(self.opt)\n" + STEP),
    ),
    "AMP809 after the step": (
        HELPERS,
        "scaler.step(optimizer)\nscaler.unscale_(optimizer)\nscaler.update()\noptimizer.zero_grad()",
        "scaler.unscale_(optimizer)\nscaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()",
    ),
    "AMP812": (
        TRAINER,
        f"{LOOP}\nself.grad_scaler.unscale_(self.opt)\n{LOOP}\n{STEP}",
        f"{LOOP}\n{LOOP}\nself.grad_scaler.unscale_(self.opt)\n{STEP}",
    ),
    "AMP813": (
        PLAIN,
        script_of(
            "class Fit:",
            "    def __init__(self, net):",
            "        self.net = net.cuda()",
            "        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)",
            "",
            "    def step(self, x, y):",
            "        with torch.amp.autocast(device_type='cuda'):",
            "            loss = F.cross_entropy(self.net(x), y)",
            "        loss.backward()",
            "        self.optimizer.step()",
        ),
        script_of(
            "class Fit:",
            "    def __init__(self, net):",
            "        self.net = net.cuda()",
            "        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.1)",
            "",
            "    def step(self, x, y):",
            "        with torch.amp.autocast(device_type='cuda', dtype=torch.bfloat16):",
            "            loss = F.cross_entropy(self.net(x), y)",
            "        loss.backward()",
            "        self.optimizer.step()",
        ),
    ),
    "AMP814": (
        PLAIN,
        _train(
            "scaler = torch.amp.GradScaler('cuda')",
            _FORWARD,
            _BACK,
            _DONE,
            before=("print('a scaler per batch')",),
        ),
        _train(_FORWARD, _BACK, _DONE),
    ),
    "AMP815": (
        PLAIN,
        _train(
            _FORWARD,
            "scaler.scale(loss).backward()\nother_scaler.scale(penalty(model)).backward()",
            "scaler.step(optimizer)\nscaler.update()\nother_scaler.update()\noptimizer.zero_grad()",
            before=('other_scaler = torch.amp.GradScaler("cuda")', 'scaler = torch.amp.GradScaler("cuda")'),
            arguments="model, optimizer, loader, penalty",
        ),
        _train(
            _FORWARD,
            "scaler.scale(loss).backward()\nscaler.scale(penalty(model)).backward()",
            _DONE,
            arguments="model, optimizer, loader, penalty",
        ),
    ),
    "AMP816": (
        PLAIN,
        _train(
            "def closure():\n    return F.mse_loss(model(x), y)\n",
            "scaler.step(optimizer, closure)\nscaler.update()",
        ),
        _train("def closure():\n    return F.mse_loss(model(x), y)\n\noptimizer.step(closure)"),
    ),
    "AMP817": (HELPERS, f"{_FINISH}\noptimizer.step()", _FINISH),
    "AMP818": (
        PLAIN,
        script_of(
            "class Fit:",
            "    def __init__(self):",
            "        self.scaler = torch.amp.GradScaler('cuda')",
            "        self.dtype = torch.bfloat16",
            "",
            "    def step(self, model, optimizer, x, y):",
            "        with torch.autocast('cuda', dtype=torch.bfloat16):",
            "            loss = F.cross_entropy(model(x), y)",
            "        self.scaler.scale(loss).backward()",
            "        self.scaler.step(optimizer)",
            "        self.scaler.update()",
        ),
        script_of(
            "class Fit:",
            "    def __init__(self):",
            "        self.scaler = torch.amp.GradScaler('cuda', enabled=False)",
            "        self.dtype = torch.bfloat16",
            "",
            "    def step(self, model, optimizer, x, y):",
            "        with torch.autocast('cuda', dtype=torch.bfloat16):",
            "            loss = F.cross_entropy(model(x), y)",
            "        self.scaler.scale(loss).backward()",
            "        self.scaler.step(optimizer)",
            "        self.scaler.update()",
        ),
    ),
    "AMP820": (
        TRAINER,
        f"{LOOP}\n{STEP}\ntorch.save({{\n    'model': self.model.state_dict(),\n"
        "    'opt': self.opt.state_dict(),\n}, 'last.pt')\nif self.restart:\n"
        "    self.opt.load_state_dict(torch.load('last.pt')['opt'])",
        f"{LOOP}\n{STEP}\ntorch.save({{\n    'model': self.model.state_dict(),\n"
        "    'opt': self.opt.state_dict(),\n    'scaler': self.grad_scaler.state_dict(),\n}, 'last.pt')",
    ),
    "AMP820 on restoring": (
        TRAINER,
        f"state = torch.load('last.pt')\nself.opt.load_state_dict(state['opt'])\n{LOOP}\n{STEP}",
        "state = torch.load('last.pt')\nself.opt.load_state_dict(state['opt'])\n"
        f"self.grad_scaler.load_state_dict(state['scaler'])\n{LOOP}\n{STEP}",
    ),
    "AMP823": (
        TRAINER,
        "loss = self.grad_scaler.scale(self.loss_of(batch))\nloss.backward()\n"
        + STEP
        + "\nif i % 10 == 0:\n    print(float(loss))",
        f"{LOOP}\n{STEP}\nif i % 10 == 0:\n    print(float(loss))",
    ),
    "AMP809 by two steps": (
        HELPERS,
        "scaler.step(optimizer)\nclip_grad_norm_(model.parameters(), 1.0)\nscaler.step(optimizer)\n"
        "scaler.update()\n"
        "optimizer.zero_grad()",
        _FINISH,
    ),
    "AMP806 without a step": (
        PLAIN,
        _train(
            "scaler.update()",
            _FORWARD,
            _BACK,
            "scaler.step(optimizer)\noptimizer.zero_grad()",
        ),
        _train(_FORWARD, _BACK, _DONE),
    ),
    "AMP809 before backward": (
        TRAINER,
        f"self.opt.zero_grad()\nself.grad_scaler.unscale_(self.opt)\n{LOOP}\n{STEP}",
        f"self.opt.zero_grad()\n{LOOP}\nself.grad_scaler.unscale_(self.opt)\n{STEP}",
    ),
    "AMP837": (
        TRAINER,
        "loss = self.loss_of(batch)\n"
        "grad, = torch.autograd.grad(self.grad_scaler.scale(loss), batch['x'], create_graph=True)\n"
        "with torch.autocast('cuda', dtype=torch.float16):\n    loss = loss + torch.norm(grad)\n"
        "self.grad_scaler.scale(loss).backward()\n" + STEP,
        "loss = self.loss_of(batch)\n"
        "grad, = torch.autograd.grad(self.grad_scaler.scale(loss), batch['x'], create_graph=True)\n"
        "grad = grad / self.grad_scaler.get_scale()\n"
        "with torch.autocast('cuda', dtype=torch.float16):\n    loss = loss + torch.norm(grad)\n"
        "self.grad_scaler.scale(loss).backward()\n" + STEP,
    ),
    "AMP840": (
        TRAINER,
        "with torch.autocast('cuda', dtype=torch.float16):\n"
        "    loss = F.cross_entropy(self.model(batch['x']), batch['y'])\n"
        "    self.grad_scaler.scale(loss).backward()  # the way back\n" + STEP,
        "with torch.autocast('cuda', dtype=torch.float16):\n"
        "    loss = F.cross_entropy(self.model(batch['x']), batch['y'])\n"
        "self.grad_scaler.scale(loss).backward()  # the way back\n" + STEP,
    ),
    "AMP840 of the step": (
        HELPERS,
        "with torch.autocast('cuda'):\n    scaler.step(optimizer)\nscaler.update()\noptimizer.zero_grad()",
        _FINISH,
    ),
    "AMP854 of the loss": (
        TRAINER,
        "with torch.autocast('cuda', dtype=torch.float16):\n    out = self.model(batch['x'])\n"
        "    out = F.linear(out, self.head)\n"
        "loss = nn.CrossEntropyLoss()(out, batch['y'])\nself.grad_scaler.scale(loss).backward()\n" + STEP,
        "with torch.autocast('cuda', dtype=torch.float16):\n    out = self.model(batch['x'])\n"
        "    out = F.linear(out, self.head)\n"
        "loss = nn.CrossEntropyLoss()(out.float(), batch['y'])\nself.grad_scaler.scale(loss).backward()\n"
        + STEP,
    ),
    "AMP844": (
        PLAIN,
        _train(
            "with torch.autocast('cuda', dtype=torch.float16):\n    loss = criterion(model(x).sigmoid(), y)",
            _BACK,
            _DONE,
            before=("scaler = torch.amp.GradScaler('cuda')", "criterion = nn.BCELoss()"),
        ),
        _train(
            "with torch.autocast('cuda', dtype=torch.float16):\n    loss = criterion(model(x), y)",
            _BACK,
            _DONE,
            before=("scaler = torch.amp.GradScaler('cuda')", "criterion = nn.BCEWithLogitsLoss()"),
        ),
    ),
    "AMP846": (
        PLAIN,
        script_of(
            "def basis(model, x):",
            "    with torch.autocast('cuda', dtype=torch.float16):",
            "        features = F.linear(x, model.weight)",
            "        q, r = torch.linalg.qr(features)",
            "    return q",
        ),
        script_of(
            "def basis(model, x):",
            "    with torch.autocast('cuda', dtype=torch.float16):",
            "        features = F.linear(x, model.weight)",
            "    q, r = torch.linalg.qr(features.float())",
            "    return q",
        ),
    ),
    "AMP847": (
        PLAIN,
        script_of(
            "def main(loader):",
            "    model = nn.Linear(4, 4).to(torch.device('cpu'))",
            "    for x in loader:",
            "        with torch.autocast(device_type='cuda', dtype=torch.bfloat16):",
            "            print(model(x).argmax())",
        ),
        script_of(
            "def main(loader):",
            "    model = nn.Linear(4, 4).to(torch.device('cuda'))",
            "    for x in loader:",
            "        with torch.autocast(device_type='cuda', dtype=torch.bfloat16):",
            "            print(model(x).argmax())",
        ),
    ),
    "AMP850": (
        PLAIN,
        script_of(
            "class Linear(torch.autograd.Function):",
            "    @staticmethod",
            "    @torch.amp.custom_fwd(device_type='cuda')",
            "    def forward(ctx, x, w):",
            "        ctx.save_for_backward(x, w)",
            "        return torch.mm(x, w)",
            "",
            "    @staticmethod",
            "    def backward(ctx, grad):",
            "        x, w = ctx.saved_tensors",
            "        return torch.mm(grad, w.t()), torch.mm(x.t(), grad)",
            "",
            "",
            "with torch.autocast('cuda'):",
            "    Linear.apply(torch.ones(2, 2), torch.ones(2, 2))",
        ),
        script_of(
            "class Linear(torch.autograd.Function):",
            "    @staticmethod",
            "    @torch.amp.custom_fwd(device_type='cuda')",
            "    def forward(ctx, x, w):",
            "        ctx.save_for_backward(x, w)",
            "        return torch.mm(x, w)",
            "",
            "    @staticmethod",
            "    @torch.amp.custom_bwd(device_type='cuda')",
            "    def backward(ctx, grad):",
            "        x, w = ctx.saved_tensors",
            "        return torch.mm(grad, w.t()), torch.mm(x.t(), grad)",
            "",
            "",
            "with torch.autocast('cuda'):",
            "    Linear.apply(torch.ones(2, 2), torch.ones(2, 2))",
        ),
    ),
    "AMP860": (
        PLAIN,
        _MODULE.format("x = x + (1.0 - mask) * -1e9"),
        _MODULE.format("x = x + (1.0 - mask) * torch.finfo(x.dtype).min"),
    ),
    "AMP861": (
        PLAIN,
        _MODULE.format("x = torch.log((x @ x).clamp(min=1e-10))"),
        _MODULE.format("x = torch.log((x @ x).clamp(min=1e-6))"),
    ),
    "AMP862": (
        PLAIN,
        script_of(
            "def main(loader):",
            "    model = nn.Linear(4, 4).to('cuda', torch.half)",
            "    optimizer = torch.optim.RMSprop(model.parameters(), lr=0.01, eps=1e-8)",
            "    for x, y in loader:",
            "        F.mse_loss(model(x), y).backward()",
            "        optimizer.step()",
        ),
        script_of(
            "def main(loader):",
            "    model = nn.Linear(4, 4).to('cuda', torch.half)",
            "    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)",
            "    for x, y in loader:",
            "        F.mse_loss(model(x), y).backward()",
            "        optimizer.step()",
        ),
    ),
}


def script(template: str, body: str) -> str:
    """A whole script: the template with the body at its places."""
    first, _, second = body.partition("<2>")
    line = next(line for line in template.splitlines() if "<>" in line)
    depth = {TRAINER: 16, HELPERS: 4, FLAG: 12}.get(template, 16 if template.startswith(TRAINER[:40]) else 0)
    text = template.replace(line, indent(dedent(first), " " * depth)).replace("<2>", second)
    return text.lstrip("\n").rstrip() + "\n"
