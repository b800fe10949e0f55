"""A second pair for the codes of mistakes that were found in the field."""

from __future__ import annotations

from tests.linter.twins import HELPERS, LOOP, PLAIN, STEP, TRAINER, script_of

_SWITCHES = script_of(
    "def train(model, optimizer, loader, amp, fp16, dtype=torch.float16):",
    "    scaler = torch.amp.GradScaler('cuda', enabled=<>)",
    "    for x, y in loader:",
    "        optimizer.zero_grad()",
    "        with torch.autocast('cuda', enabled=amp):",
    "            loss = F.mse_loss(model(x), y)",
    "        scaler.scale(loss).backward()",
    "        scaler.step(optimizer)",
    "        scaler.update()",
)
_SHARDED = script_of(
    "from torch.distributed.fsdp import FullyShardedDataParallel",
    "from torch.distributed.fsdp.sharded_grad_scaler import ShardedGradScaler",
    "",
    "class Job:",
    "    def __init__(self, net):",
    "        self.model = FullyShardedDataParallel(net)",
    "        self.opt = torch.optim.SGD(self.model.parameters(), lr=0.1)",
    "        self.scaler = <>",
    "",
    "    def run(self, loader):",
    "        for x, y in loader:",
    "            self.opt.zero_grad()",
    "            with torch.autocast('cuda', dtype=torch.float16):",
    "                loss = F.mse_loss(self.model(x), y)",
    "            self.scaler.scale(loss).backward()",
    "            self.scaler.step(self.opt)",
    "            self.scaler.update()",
)
_AVERAGED = script_of(
    "class Average:",
    "    def __init__(self, model):",
    "        self.shadow = {k: v.detach()<> for k, v in model.state_dict().items()}",
    "",
    "    @torch.no_grad()",
    "    def update(self, model, decay=0.9999):",
    "        for k, v in model.state_dict().items():",
    "            self.shadow[k].mul_(decay).add_(v, alpha=1 - decay)",
)
_TRACKED = script_of(
    "import copy",
    "",
    "class Average:",
    "    def __init__(self, model):",
    "        self.model = copy.deepcopy(model)<>",
    "",
    "    @torch.no_grad()",
    "    def update(self, model, rate=1e-4):",
    "        for average, new in zip(self.model.parameters(), model.parameters()):",
    "            average.sub_(rate * (average - new.to(average.dtype)))",
)
_EVALUATED = script_of(
    "import copy",
    "",
    "def evaluate(model, loader):",
    "    model = <>",
    "    for x, y in loader:",
    "        model(x.half())",
    "    model.float()",
    "",
    "def train(net: nn.Module, optimizer, loader, steps):",
    "    average = copy.deepcopy(net).requires_grad_(False)",
    "    for epoch in range(steps):",
    "        optimizer.step()",
    "        for old, new in zip(average.parameters(), net.parameters()):",
    "            old.lerp_(new, 1e-3)",
    "        evaluate(average, loader)",
)
_ENCODED = script_of(
    "def encoding(timesteps, width):",
    "    rates = torch.exp(-torch.arange(width // 2) * 9.2 / (width // 2))",
    "    angles = timesteps[:, None].float() * rates[None]",
    "    return torch.cat([angles.sin(), angles.cos()], dim=-1)",
    "",
    "",
    "def embed(mlp, t):",
    "    return mlp(encoding(<>, 256))",
)
_RATIO = script_of(
    "class Learner:",
    "    def __init__(self, policy: nn.Module):",
    "        self.policy = policy.<>",
    "",
    "    def scores(self, x, actions):",
    "        return F.log_softmax(self.policy(x), -1).gather(-1, actions)",
    "",
    "    def learn(self, x, actions, old, gain):",
    "        ((self.scores(x, actions) - old).exp() * gain).mean().backward()",
)
_OVERLAP = script_of(
    "def overlap(p, target):",
    "    return (p * target).sum() / (p.sum(dim=(1, 2)) + target.sum() + 1)",
    "",
    "",
    "def train(x, target):",
    "    net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 1, 3))",
    "    with torch.autocast('cuda', dtype=torch.float16):",
    "        logits = net(x)",
    "    return overlap(<>, target)",
)
_CANVAS = script_of(
    "class Pillars(nn.Module):",
    "    def __init__(self):",
    "        super().__init__()",
    "        self.encode = nn.Sequential(nn.Linear(9, 64), nn.ReLU())",
    "",
    "    def forward(self, points, cells):",
    "        features = self.encode(points)",
    "        canvas = <>",
    "        canvas[cells.long()] = features",
    "        return canvas",
    "",
    "",
    "def train(loader):",
    "    net = Pillars().cuda()",
    "    for points, cells in loader:",
    "        with torch.autocast('cuda', dtype=torch.bfloat16):",
    "            loss = net(points, cells).mean()",
)
_POLICY = script_of(
    "from policies import Actor",
    "",
    "",
    "def update(loader):",
    "    actor = Actor().cuda()",
    "    opt = torch.optim.AdamW(actor.parameters(), lr=3e-4)",
    "    for ids, before, advantage in loader:",
    "        opt.zero_grad()",
    "        with torch.autocast('cuda', dtype=torch.bfloat16):",
    "            logits = actor(ids)",
    "        after = F.log_softmax(<>, dim=-1)",
    "        (-advantage * (after - before).exp()).mean().backward()",
    "        opt.step()",
)
_DECODED = script_of(
    "from diffusers import AutoencoderKL",
    "",
    "MODEL = '<>'",
    "",
    "",
    "@torch.inference_mode()",
    "def preview(latents):",
    "    vae = AutoencoderKL.from_pretrained(MODEL, subfolder='vae').cuda().eval()",
    "    with torch.autocast('cuda', dtype=torch.float16):",
    "        return vae.decode(latents / vae.config.scaling_factor).sample.clamp(-1, 1)",
)
_SAMPLED = script_of(
    "from accelerate import Accelerator",
    "from diffusers import AutoencoderKL",
    "",
    "accelerator = Accelerator(mixed_precision='<>')",
    "vae = AutoencoderKL.from_pretrained('stabilityai/stable-diffusion-xl-base-1.0', subfolder='vae')",
    "with accelerator.autocast(), torch.no_grad():",
    "    latents = vae.encode(torch.rand(1, 3, 512, 512)).latent_dist.sample()",
)
_LATENTS = script_of(
    "from diffusers import AutoencoderKL",
    "",
    "",
    "@torch.no_grad()",
    "def cache(loader, device):",
    "    vae = AutoencoderKL.from_pretrained('stabilityai/sdxl-vae')",
    "    <>",
    "    return [vae.encode(x.to(device, vae.dtype)).latent_dist.sample() for x in loader]",
)
_CONDITIONED = script_of(
    "class Denoiser(nn.Module):",
    "    def forward(self, x, before):",
    "        return x - before",
    "",
    "",
    "def estimate(net, x):",
    "    with <>:",
    "        return net(x, torch.zeros_like(x)).detach()",
    "",
    "",
    "def fit(loader):",
    "    net = Denoiser().cuda()",
    "    opt = torch.optim.SGD(net.parameters(), lr=0.1)",
    "    for x, y in loader:",
    "        opt.zero_grad()",
    "        with torch.autocast('cuda', dtype=torch.bfloat16):",
    "            loss = F.mse_loss(net(x, estimate(net, x)), y)",
    "        loss.backward()",
    "        opt.step()",
)
_SMALL_STEPS = script_of(
    "def fit(net: nn.Module, loader):",
    "    net.bfloat16().cuda()",
    "    adam = torch.optim.Adam([{'params': [p for p in net.parameters()]}], <>)",
    "    for x, y in loader:",
    "        adam.zero_grad()",
    "        F.cross_entropy(net(x), y).backward()",
    "        adam.step()",
)
_CLIPPED = script_of(
    "from torch.distributed.fsdp import FullyShardedDataParallel",
    "",
    "",
    "class Trainer:",
    "    def __init__(self, net):",
    "        self.net = FullyShardedDataParallel(net)",
    "        self.adam = torch.optim.Adam(self.net.parameters())",
    "",
    "    def step(self, x, y):",
    "        self.adam.zero_grad()",
    "        F.cross_entropy(self.net(x), y).backward()",
    "        <>",
    "        self.adam.step()",
)
_CONTRASTED = script_of(
    "def contrast(x, y, scale):",
    "    powers = (x @ y.T * scale).exp()",
    "    return -torch.log(powers.diagonal() / powers.sum(1)).mean()",
    "",
    "def train(net, optimizer, loader):",
    "    scaler = torch.amp.GradScaler('cuda')",
    "    for a, b in loader:",
    "        optimizer.zero_grad()",
    "        with torch.autocast('cuda', dtype=torch.float16):",
    "            x, y = net(a), net(b)",
    "        loss = contrast(x.<>(), y.<>(), 30.0)",
    "        scaler.scale(loss).backward()",
    "        scaler.step(optimizer)",
    "        scaler.update()",
)
_APEX = script_of(
    "import apex",
    "",
    "def build(args, net):",
    "    opt = torch.optim.SGD(net.parameters(), lr=0.1)",
    "    <>",
    "    return net, opt",
)
_WRAPPED = "if args.distributed:\n        net = nn.DataParallel(net)"
_INITIALIZED = "net, opt = apex.amp.initialize(net, opt, opt_level='O2')"
_ENGINE = script_of(
    "import deepspeed",
    "",
    "def main(args, model, loader):",
    "    engine, *_ = deepspeed.initialize(args=args, model=model)",
    "    for x, y in loader:",
    "        loss = F.mse_loss(engine(x), y)",
    "        engine.backward(<>)",
    "        engine.step()",
)
# code: template, bad, good
FIELD_TWINS: dict[str, tuple[str, str, str]] = {
    "AMP827": (
        TRAINER,
        LOOP + "\nself.grad_scaler.step(self.opt)\n"
        "old = self.grad_scaler.get_scale()\n"
        "self.grad_scaler.update()\n"
        "if self.grad_scaler.get_scale() != old:\n    self.opt.zero_grad()\n    continue",
        LOOP + "\nself.grad_scaler.step(self.opt)\n"
        "old = self.grad_scaler.get_scale()\n"
        "self.grad_scaler.update()\n"
        "if self.grad_scaler.get_scale() < old:\n    self.opt.zero_grad()\n    continue",
    ),
    "AMP828": (
        HELPERS,
        "    scaler.unscale_(optimizer)\n    norm = clip_grad_norm_(model.parameters(), 1.0)\n"
        "    if not torch.isnan(norm):\n        scaler.step(optimizer)\n        scaler.update()\n"
        "    optimizer.zero_grad()",
        "    scaler.unscale_(optimizer)\n    norm = clip_grad_norm_(model.parameters(), 1.0)\n"
        "    if not torch.isnan(norm):\n        scaler.step(optimizer)\n    scaler.update()\n"
        "    optimizer.zero_grad()",
    ),
    "AMP839": (
        TRAINER,
        "if self.mixed:\n"
        "    self.opt.zero_grad()\n"
        "    self.grad_scaler.scale(self.loss_of(batch)).backward()\n"
        "    self.grad_scaler.step(self.opt)\n    self.grad_scaler.update()\nelse:\n"
        "    F.cross_entropy(self.model(batch['x']), batch['y']).backward()\n    self.opt.step()",
        "self.opt.zero_grad()\nif self.mixed:\n"
        "    self.grad_scaler.scale(self.loss_of(batch)).backward()\n"
        "    self.grad_scaler.step(self.opt)\n    self.grad_scaler.update()\nelse:\n"
        "    F.cross_entropy(self.model(batch['x']), batch['y']).backward()\n    self.opt.step()",
    ),
    "AMP852": (
        PLAIN,
        script_of(
            "def tune(model, optimizer, loader):",
            "    with torch.autocast('cuda', dtype=torch.bfloat16):",
            "        for _ in range(4):",
            "            for x, y in loader:",
            "                optimizer.zero_grad()",
            "                F.mse_loss(model(x), y).backward()",
            "                optimizer.step()",
        ),
        script_of(
            "def tune(model, optimizer, loader):",
            "    for _ in range(4):",
            "        for x, y in loader:",
            "            optimizer.zero_grad()",
            "            with torch.autocast('cuda', dtype=torch.bfloat16):",
            "                loss = F.mse_loss(model(x), y)",
            "            loss.backward()",
            "            optimizer.step()",
        ),
    ),
    "AMP847 by none": (
        PLAIN,
        script_of(
            "def predict(model, x):",
            "    device = torch.device('cuda')",
            "    with torch.no_grad(), torch.autocast(device, dtype=torch.float16):",
            "        return model(x)",
        ),
        script_of(
            "def predict(model, x):",
            "    device = torch.device('cuda')",
            "    with torch.no_grad(), torch.autocast(device.type, dtype=torch.float16):",
            "        return model(x)",
        ),
    ),
    "AMP854": (
        TRAINER,
        "out = self.model(batch['x'])\nwith torch.autocast('cuda', dtype=torch.float16):\n"
        "    loss = F.mse_loss(out, batch['y'])\nself.grad_scaler.scale(loss).backward()\n" + STEP,
        "with torch.autocast('cuda', dtype=torch.float16):\n    out = self.model(batch['x'])\n"
        "    loss = F.mse_loss(out, batch['y'])\nself.grad_scaler.scale(loss).backward()\n" + STEP,
    ),
    "AMP856": (
        PLAIN,
        _SWITCHES.replace("enabled=<>", "enabled=dtype is torch.float16").replace(
            "enabled=amp", "enabled=True"
        ),
        _SWITCHES.replace("enabled=<>", "enabled=dtype is torch.float16").replace(
            "enabled=amp", "dtype=dtype"
        ),
    ),
    "AMP857": (
        PLAIN,
        _SHARDED.replace("<>", "torch.amp.GradScaler('cuda')"),
        _SHARDED.replace("<>", "ShardedGradScaler()"),
    ),
    "AMP858": (
        PLAIN,
        _APEX.replace("<>", f"{_WRAPPED}\n    {_INITIALIZED}"),
        _APEX.replace("<>", f"{_INITIALIZED}\n    {_WRAPPED}"),
    ),
    "AMP859": (PLAIN, _ENGINE.replace("<>", "loss / args.grad_accum"), _ENGINE.replace("<>", "loss")),
    "AMP867": (PLAIN, _AVERAGED.replace("<>", ".half()"), _AVERAGED.replace("<>", ".clone()")),
    "AMP867 of a difference": (
        PLAIN,
        _TRACKED.replace("<>", ".to(torch.float16)"),
        _TRACKED.replace("<>", ".to('cuda:1')"),
    ),
    "AMP867 of a round trip": (
        PLAIN,
        _EVALUATED.replace("<>", "model.half()"),
        _EVALUATED.replace("<>", "copy.deepcopy(model).half()"),
    ),
    "AMP868": (PLAIN, _CONTRASTED.replace("<>", "half"), _CONTRASTED.replace("<>", "float")),
    "AMP869": (PLAIN, _ENCODED.replace("<>", "t.to(torch.bfloat16)"), _ENCODED.replace("<>", "t")),
    "AMP870": (PLAIN, _SMALL_STEPS.replace("<>", "2e-6"), _SMALL_STEPS.replace("<>", "2e-3")),
    "AMP871": (
        PLAIN,
        _CLIPPED.replace("<>", "torch.nn.utils.clip_grad_norm_(self.net.parameters(), 1.0)"),
        _CLIPPED.replace("<>", "self.net.clip_grad_norm_(1.0)"),
    ),
    "AMP868 of log-probabilities": (PLAIN, _RATIO.replace("<>", "half()"), _RATIO.replace("<>", "float()")),
    "AMP868 of an unknown model's logits": (
        PLAIN,
        _POLICY.replace("<>", "logits"),
        _POLICY.replace("<>", "logits.float()"),
    ),
    "AMP873": (PLAIN, _OVERLAP.replace("<>", "logits.sigmoid()"), _OVERLAP.replace("<>", "logits.float()")),
    "AMP874": (
        PLAIN,
        _CANVAS.replace("<>", "torch.zeros(9, 64)"),
        _CANVAS.replace("<>", "features.new_zeros(9, 64)"),
    ),
    "AMP875": (
        PLAIN,
        _CONDITIONED.replace("<>", "torch.no_grad()"),
        _CONDITIONED.replace("<>", "torch.no_grad(), torch.autocast('cuda', enabled=False)"),
    ),
    "AMP876": (
        PLAIN,
        _DECODED.replace("<>", "stabilityai/stable-diffusion-xl-base-1.0"),
        _DECODED.replace("<>", "madebyollin/sdxl-vae-fp16-fix"),
    ),
    "AMP876 under Accelerate": (
        PLAIN,
        _SAMPLED.replace("<>", "fp16"),
        _SAMPLED.replace("<>", "bf16"),
    ),
    "AMP876 by its weights": (
        PLAIN,
        _LATENTS.replace("<>", "vae.requires_grad_(False).to(device, torch.float16)"),
        _LATENTS.replace("<>", "vae.requires_grad_(False).to(device, torch.bfloat16)"),
    ),
}
