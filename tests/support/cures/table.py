"""Models with one fault each, by what may cure them; a change that makes another model is no cure."""

from __future__ import annotations

from tests.support.cures.case import Case

SPREAD = "z = self.inner(x) * 40"
QK = """
self.q, self.k = nn.Linear(16, 16), nn.Linear(16, 16)
"""
LARGE = "torch.randn(2, 8, 16) * 500"
SCORES = "q, k = self.q(x), self.k(x)\n"
ZERO_ROW = "torch.randn(4, 16) * torch.tensor([[0.0], [1.0], [1.0], [1.0]])"
MASK = "mask = torch.ones(4, 16, dtype=torch.bool).triu(1)\nmask[0] = True\n"
PAIR = """
self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)
with torch.no_grad():
    self.up.weight.mul_(1e5)
    self.down.weight.mul_(1e-5)
"""
ONES = "torch.randn(4, 16)"

LOG_SOFTMAX = [
    Case(
        "log of softmax",
        f"{SPREAD}\nreturn torch.log(torch.softmax(z, dim=-1))  # scores",
        rewrite=(("torch.log(torch.softmax(z, dim=-1))", "torch.log_softmax(z, dim=-1)"),),
    ),
    Case(
        "functional softmax, method log",
        f"{SPREAD}\nreturn F.softmax(z, dim=-1).log()",
        rewrite=(("F.softmax(z, dim=-1).log()", "F.log_softmax(z, dim=-1)"),),
    ),
    Case(
        "methods only",
        f"{SPREAD}\nreturn z.softmax(-1).log()",
        rewrite=(("z.softmax(-1).log()", "z.log_softmax(-1)"),),
    ),
    Case(
        "softmax over the rows",
        "z = self.inner(x) * 20\nreturn torch.log(torch.softmax(z, 0)).mean(0)",
        inputs="torch.randn(32, 16)",
        rewrite=(("torch.log(torch.softmax(z, 0))", "torch.log_softmax(z, 0)"),),
    ),
    Case(
        "call over several lines",
        """
        z = self.inner(x) * 40
        return torch.log(
            torch.softmax(
                z,  # the scores
                dim=-1,
            )
        )
        """,
        rewrite=(
            ("torch.log(\n            torch.softmax(\n", "torch.log_softmax(\n"),
            ("dim=-1,\n            )\n        )", "dim=-1,\n            )"),
        ),
    ),
    Case(
        "one line in a loop",
        """
        y = x
        for layer, gain in ((self.a, 40.0), (self.b, 0.01)):
            y = torch.log(torch.softmax(layer(y) * gain, -1))
        return y
        """,
        init="self.a, self.b = nn.Linear(16, 16), nn.Linear(16, 16)",
        rewrite=(
            ("torch.log(torch.softmax(layer(y) * gain, -1))", "torch.log_softmax(layer(y) * gain, -1)"),
        ),
    ),
    Case(
        "another reader of the probabilities",
        f"{SPREAD}\np = torch.softmax(z, -1)\nreturn torch.log(p), p @ p.transpose(0, 1)",
        rewrite=(("torch.log(p)", "torch.log_softmax(z, -1)"),),
    ),
    Case(
        "two calls on a line",
        f"{SPREAD}\nreturn torch.log(torch.softmax(z, -1)) + torch.log(torch.softmax(z / 2, -1))",
        rewrite=(
            ("torch.log(torch.softmax(z, -1))", "torch.log_softmax(z, -1)"),
            ("torch.log(torch.softmax(z / 2, -1))", "torch.log_softmax(z / 2, -1)"),
        ),
        by_hand=True,
    ),
    Case("logarithm to base 2", f"{SPREAD}\nreturn torch.log2(torch.softmax(z, -1))"),
    Case("an eps in between", f"{SPREAD}\nreturn torch.log(torch.softmax(z, -1) + 1e-8)"),
    Case(
        "a view in between",
        f"{SPREAD}\nreturn torch.log(torch.softmax(z, -1).transpose(0, 1))",
    ),
    Case(
        "scores written in between",
        f"{SPREAD}\np = torch.softmax(z, -1)\nz.mul_(0.5)\nreturn torch.log(p) + z",
    ),
    Case(
        "probabilities written in between",
        f"{SPREAD}\np = torch.softmax(z, -1)\np.mul_(0.5)\nreturn torch.log(p)",
    ),
    Case(
        "the author's own cast in between",
        f"{SPREAD}\nreturn torch.log(torch.softmax(z, -1).float())",
    ),
]

LOG_SIGMOID = [
    Case(
        "log of one minus sigmoid",
        "z = self.inner(x) * 8\nreturn torch.log(1 - torch.sigmoid(z))",
        rewrite=(("torch.log(1 - torch.sigmoid(z))", "F.logsigmoid(-z)"),),
    ),
    Case(
        "log of sigmoid",
        f"{SPREAD}\nreturn torch.log(torch.sigmoid(z))",
        rewrite=(("torch.log(torch.sigmoid(z))", "F.logsigmoid(z)"),),
    ),
    Case(
        "methods only",
        "z = self.inner(x) * 8\nreturn (1.0 - z.sigmoid()).log()",
        rewrite=(("(1.0 - z.sigmoid()).log()", "F.logsigmoid(-z)"),),
    ),
    Case(
        "an expression inside",
        "return torch.log(1 - torch.sigmoid(self.inner(x) * 8 + 1))",
        rewrite=(
            (
                "torch.log(1 - torch.sigmoid(self.inner(x) * 8 + 1))",
                "F.logsigmoid(-(self.inner(x) * 8 + 1))",
            ),
        ),
    ),
    Case("logarithm to base 10", "return torch.log10(1 - torch.sigmoid(self.inner(x) * 8))"),
    Case("an eps in between", "return torch.log(1 - torch.sigmoid(self.inner(x) * 8) + 1e-9)"),
]

SCALE = [
    Case(
        "divided on the same line",
        f"{SCORES}return torch.softmax(q @ k.transpose(-2, -1) / 1e5, -1)",
        QK,
        LARGE,
        rewrite=(("q @ k.transpose(-2, -1) / 1e5", "(q / 1e5) @ k.transpose(-2, -1)"),),
    ),
    Case(
        "attention in one line",
        f"{SCORES}return torch.softmax(q @ k.transpose(-2, -1) / 1e5, -1) @ x",
        QK,
        LARGE,
        rewrite=(("q @ k.transpose(-2, -1) / 1e5", "(q / 1e5) @ k.transpose(-2, -1)"),),
    ),
    Case(
        "autocast",
        f"{SCORES}return torch.softmax(q @ k.transpose(-2, -1) / 1e5, -1)",
        QK,
        LARGE,
        rewrite=(("q @ k.transpose(-2, -1) / 1e5", "(q / 1e5) @ k.transpose(-2, -1)"),),
        policy="torch-cpu",
    ),
    Case(
        "one line, read by others in another layer",
        """
        y = x
        for layer in (self.q, self.k):
            s = layer(y) @ y.transpose(-2, -1)
            y = torch.softmax(s / 1e5, -1) @ x
        return y, torch.tanh(s)
        """,
        QK,
        LARGE,
    ),
    Case(
        "matmul times a number",
        f"{SCORES}s = torch.matmul(q, k.transpose(-2, -1)) * 1e-5\nreturn torch.softmax(s, -1)",
        QK,
        LARGE,
        rewrite=(
            ("torch.matmul(q, k.transpose(-2, -1)) * 1e-5", "torch.matmul(q * 1e-5, k.transpose(-2, -1))"),
        ),
    ),
    Case(
        "a line of its own",
        f"{SCORES}s = q @ k.transpose(-2, -1)  # scores\ns = s / math.sqrt(1e10)\n"
        "return torch.softmax(s, -1)",
        QK,
        LARGE,
        rewrite=(
            ("s = q @ k.transpose(-2, -1)  #", "s = (q / math.sqrt(1e10)) @ k.transpose(-2, -1)  #"),
            ("        s = s / math.sqrt(1e10)\n", ""),
        ),
    ),
    Case(
        "inside the softmax",
        f"{SCORES}s = torch.bmm(q, k.transpose(-2, -1))\nreturn torch.softmax(s * 1e-5, dim=-1)",
        QK,
        LARGE,
        rewrite=(
            ("torch.bmm(q, k.transpose(-2, -1))", "torch.bmm(q * 1e-5, k.transpose(-2, -1))"),
            ("torch.softmax(s * 1e-5, dim=-1)", "torch.softmax(s, dim=-1)"),
        ),
    ),
    Case(
        "a sum as the first operand",
        f"{SCORES}s = (q + k) @ k.transpose(-2, -1) / 1e5\nreturn torch.softmax(s, -1)",
        QK,
        LARGE,
        rewrite=(("(q + k) @ k.transpose(-2, -1) / 1e5", "((q + k) / 1e5) @ k.transpose(-2, -1)"),),
    ),
    Case(
        "einsum",
        f'{SCORES}s = torch.einsum("bid,bjd->bij", q, k) / 1e5\nreturn torch.softmax(s, -1)',
        QK,
        LARGE,
        rewrite=((", q, k) / 1e5", ", q / 1e5, k)"),),
        by_hand=True,
    ),
    Case(
        "two readers, one scale",
        f"{SCORES}s = q @ k.transpose(-2, -1)\na = torch.softmax(s / 1e5, -1)\n"
        "b = torch.softmax(s / 1e5, -2)\nreturn a + b",
        QK,
        LARGE,
        rewrite=(
            ("s = q @", "s = (q / 1e5) @"),
            ("a = torch.softmax(s / 1e5, -1)", "a = torch.softmax(s, -1)"),
            ("b = torch.softmax(s / 1e5, -2)", "b = torch.softmax(s, -2)"),
        ),
        by_hand=True,
    ),
    Case(
        "two readers, two scales",
        f"{SCORES}s = q @ k.transpose(-2, -1)\n"
        "return torch.softmax(s / 1e5, -1) + torch.softmax(s / 3e5, -2)",
        QK,
        LARGE,
    ),
    Case(
        "another output reads the scores",
        f"{SCORES}s = q @ k.transpose(-2, -1)\nreturn torch.softmax(s / 1e5, -1), torch.tanh(s)",
        QK,
        LARGE,
    ),
    Case(
        "the scores are returned",
        f"{SCORES}s = q @ k.transpose(-2, -1)\nreturn torch.softmax(s / 1e5, -1), s.flatten(1)",
        QK,
        LARGE,
    ),
    Case(
        "a mask in between",
        f"{SCORES}s = q @ k.transpose(-2, -1) + torch.ones(8, 8, dtype=q.dtype).triu(1) * -1e4\n"
        "return torch.softmax(s / 1e5, -1)",
        QK,
        LARGE,
    ),
    Case(
        "scaled in place",
        f"{SCORES}s = q @ k.transpose(-2, -1)\ns /= 1e5\nreturn torch.softmax(s, -1)",
        QK,
        LARGE,
    ),
]

EPS = [
    Case(
        "added to a denominator",
        "h = torch.relu(x)\nreturn h / (h.sum(-1, keepdim=True) + 1e-8)",
        "",
        ZERO_ROW,
        rewrite=(("1e-8", "1e-05"),),
    ),
    Case(
        "normalize, by default",
        "return F.normalize(x, dim=-1)",
        "",
        ZERO_ROW,
        rewrite=(("dim=-1)", "dim=-1, eps=1e-05)"),),
        by_hand=True,
    ),
    Case(
        "normalize",
        "return F.normalize(x, dim=-1, eps=1e-9)",
        "",
        ZERO_ROW,
        rewrite=(("1e-9", "1e-05"),),
    ),
    Case(
        "RMS norm of values near one",
        "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-8)",
        "",
        ZERO_ROW,
        rewrite=(("1e-8", "1e-05"),),
    ),
    Case(
        "RMS norm of small values: the smallest eps",
        "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-9)",
        "",
        f"{ZERO_ROW} * 4e-3",
        rewrite=(("1e-9", "1e-07"),),
    ),
    Case(
        "RMS norm of values near 1e-5",
        "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12)",
        "",
        f"{ONES} * 1e-5",
    ),
    Case(
        "layer norm by hand",
        "c = x - x.mean(-1, keepdim=True)\nreturn c / torch.sqrt(c.square().mean(-1, keepdim=True) + 1e-12)",
        "",
        ZERO_ROW,
        rewrite=(("1e-12", "1e-05"),),
    ),
    Case(
        "batch norm by hand",
        "c = x - x.mean(0)\nreturn c * torch.rsqrt(x.var(0, unbiased=False) + 1e-8)",
        "",
        "torch.randn(8, 16) * (torch.arange(16) > 2).float()",
        rewrite=(("1e-8", "1e-05"),),
    ),
    Case(
        "Adam's update",
        "m, v = x * 0.5, x.square() * 0.25\nreturn m / (v.sqrt() + 1e-8)",
        "",
        "(torch.rand(4, 16) + 0.5) * torch.tensor([[0.0], [1.0], [-1.0], [2.0]])",
        rewrite=(("1e-8", "1e-05"),),
    ),
    Case(
        "a lower limit",
        "return x / x.norm(dim=-1, keepdim=True).clamp(min=1e-9)",
        "",
        ZERO_ROW,
        rewrite=(("1e-9", "1e-05"),),
    ),
    Case(
        "two of them on a line",
        "h = torch.relu(x)\n"
        "return h / (h.sum(-1, keepdim=True) + 1e-8) - h / (h.amax(-1, keepdim=True) + 1e-8)",
        "",
        ZERO_ROW,
        rewrite=(
            ("h.sum(-1, keepdim=True) + 1e-8", "h.sum(-1, keepdim=True) + 1e-05"),
            ("h.amax(-1, keepdim=True) + 1e-8", "h.amax(-1, keepdim=True) + 1e-05"),
        ),
        by_hand=True,
    ),
    Case(
        "below a logarithm, where it is the value",
        "return torch.log(torch.relu(x) + 1e-10)",
        "",
        ONES,
    ),
    Case(
        "good on one batch, and not on the next",
        "return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-12)",
        "",
        f"{ZERO_ROW} * (1.0, 1e-5)[number]",
        count=2,
    ),
]

CONSTANTS = [
    Case(
        "masked_fill",
        f"{MASK}s = self.inner(x)\nreturn torch.softmax(s.masked_fill(mask, -1e9), -1)",
        rewrite=(("-1e9", "torch.finfo(s.dtype).min"),),
    ),
    Case(
        "where",
        f"{MASK}s = self.inner(x)\nreturn torch.softmax(torch.where(mask, -1e9, s), -1)",
        rewrite=(("-1e9", "torch.finfo(s.dtype).min"),),
    ),
    Case(
        "an additive mask",
        "s = self.inner(x) + (1.0 - keep) * -1e9\nreturn torch.softmax(s, -1)",
        inputs="(torch.randn(4, 16), torch.ones(4, 16).tril() * (torch.arange(4) > 0).float()[:, None])",
        arguments="x, keep",
        rewrite=(("-1e9", "torch.finfo(keep.dtype).min"),),
    ),
    Case(
        "a mask that is cast",
        "mask = (1 - torch.ones(4, 16).tril(-1)) * -1e9\n"
        "return torch.softmax(self.inner(x) + mask.to(x.dtype), -1)",
        rewrite=(("-1e9", "torch.finfo(x.dtype).min"),),
    ),
    Case(
        "a mask that meets zero",
        "mask = ((1 - torch.ones(4, 16).tril()) * -1e9).to(x.dtype)\n"
        "rows = torch.tensor([[0.0], [1.0], [1.0], [1.0]]).to(x.dtype)\n"
        "return (self.inner(x) + mask * rows).amax(-1)",
        rewrite=(("-1e9", "torch.finfo(x.dtype).min"),),
    ),
    Case(
        "a gain",
        "gain = torch.full_like(x, 1e5)\nreturn torch.tanh(self.inner(x) * gain * 1e-5)",
    ),
    Case(
        "a gain of constants",
        "gain = torch.ones(16, dtype=x.dtype) * 1e5\nreturn torch.tanh(self.inner(x) * gain * 1e-5)",
    ),
    Case(
        "the base of rotary positions",
        "base = torch.full((8,), 1e6, dtype=torch.float32).to(x.dtype)\n"
        "inv = base ** -(torch.arange(0, 16, 2) / 16).to(x.dtype)\n"
        "return torch.cat([torch.cos(x[:, :8] * inv), torch.sin(x[:, 8:] * inv)], -1)",
    ),
    Case(
        "a divisor",
        "return self.inner(x) * 1e3 / torch.full_like(x, 1e5)",
    ),
    Case(
        "the scale of timesteps",
        "t = (x * 1e5).sum(-1, keepdim=True)\nreturn torch.sin(t * 1e-5 + self.inner(x))",
    ),
    Case(
        "a filler that is returned",
        f"{MASK}s = self.inner(x).masked_fill(mask, 1e6)\nreturn s.amin(-1)",
        by_runs=True,
    ),
    Case(
        "bounds of a clamp above which values lie",
        "h = self.inner(x) * 1e6\nreturn h.clamp(-2e5, 2e5) * 1e-5",
    ),
    Case(
        "a mask that is added to what is returned",
        "mask = (1 - torch.ones(4, 16).tril()) * -1e9\nreturn self.inner(x) + mask.to(x.dtype)",
    ),
]

RESCALE = [
    Case("linear, relu, linear", "return self.down(torch.relu(self.up(x)))", PAIR, kinds=("rescale",)),
    Case(
        "autocast",
        "return self.down(torch.relu(self.up(x)))",
        PAIR,
        kinds=("rescale",),
        policy="torch-cpu",
    ),
    Case(
        "layers of a Sequential",
        "return self.net(x)",
        """
        self.net = nn.Sequential(nn.Linear(16, 16), nn.LeakyReLU(), nn.Dropout(), nn.Linear(16, 16))
        with torch.no_grad():
            self.net[0].weight.mul_(1e5)
            self.net[3].weight.mul_(1e-5)
        """,
        kinds=("rescale",),
    ),
    Case(
        "convolutions with bias around a max_pool",
        "return self.b(F.max_pool2d(torch.relu(self.a(x)), 2))",
        """
        self.a, self.b = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 4, 3)
        with torch.no_grad():
            self.a.weight.mul_(2e5)
            self.a.bias.mul_(2e4)
            self.b.weight.mul_(1e-5)
        """,
        "torch.randn(2, 3, 12, 12)",
        kinds=("rescale",),
    ),
    Case(
        "two heads",
        "h = torch.relu(self.up(x))\nreturn self.down(h), self.side(h)",
        PAIR + "self.side = nn.Linear(16, 4)\nnn.init.constant_(self.side.weight, 1e-6)\n",
        kinds=("rescale",),
    ),
    Case(
        "a residual",
        "h = torch.relu(self.up(x))\nreturn self.down(h) + torch.tanh(h)",
        PAIR,
        never=("rescale",),
    ),
    Case("gelu in between", "return self.down(F.gelu(self.up(x)))", PAIR, never=("rescale",)),
    Case("a bias in between", "return self.down(torch.relu(self.up(x) + 3.0))", PAIR, never=("rescale",)),
    Case(
        "the hidden values are returned",
        "h = torch.relu(self.up(x))\nreturn self.down(h), h.flatten()",
        PAIR,
        never=("rescale",),
    ),
    Case(
        "tied weights",
        "h = torch.relu(self.up(x))\nreturn F.linear(h, self.down.weight) + self.down(x)",
        PAIR,
        never=("rescale",),
    ),
    Case(
        "weights that share memory",
        "return self.down(torch.relu(self.up(x)))",
        PAIR + "self.view = nn.Parameter(self.down.weight.data)\n",
        never=("rescale",),
    ),
    Case(
        "the hidden values are a weight",
        "return torch.tanh(F.linear(self.down(x), torch.relu(self.up(x))) * 1e-5)",
        PAIR,
        inputs="torch.randn(16, 16)",
        never=("rescale",),
    ),
]

NORMED = """
self.up, self.norm, self.down = nn.Linear(16, 16), nn.LayerNorm(16), nn.Linear(16, 16)
with torch.no_grad():
    self.up.weight.mul_(1e5)
"""
RULES = [
    Case("a norm reads it", "return self.down(self.norm(self.up(x)))", NORMED, kinds=("rule",)),
    Case("a relu and a norm", "return self.down(self.norm(torch.relu(self.up(x))))", NORMED, kinds=("rule",)),
    Case(
        "views and a cat",
        "h = self.up(x).view(2, 2, 16)\nh = torch.cat([h, h], 1).flatten(0, 1)\n"
        "return self.down(self.norm(h))",
        NORMED,
        kinds=("rule",),
    ),
    Case("a scale in between", "return self.down(self.up(x) * 1e-5 + x)", NORMED, kinds=("rule",)),
    Case("written in place", "h = self.up(x)\nh.mul_(1e-5)\nreturn self.down(h)", NORMED, kinds=("rule",)),
    Case(
        "two readers",
        "h = self.up(x)\nreturn self.down(self.norm(h)) + torch.tanh(h * 1e-5)",
        NORMED,
        kinds=("rule",),
    ),
    Case("autocast", "return self.down(self.norm(self.up(x)))", NORMED, policy="torch-cuda", kinds=("rule",)),
    Case(
        "a weight beyond the format",
        "return self.down(torch.tanh(self.up(x) * 1e-5))",
        "self.up, self.down = nn.Linear(16, 16), nn.Linear(16, 16)\nnn.init.constant_(self.up.weight, 1e5)\n",
        inputs=f"{ONES} * 1e-3",
        kinds=("rule",),
    ),
    Case(
        "a rounded angle",
        "return torch.sin(x * 5000.3)",
        "",
        "torch.randint(-8, 8, (4, 16)) / 8",
        kinds=("rule",),
        never=("dtype",),
    ),
    Case(
        "a rounded angle, and a layer after it",
        "return self.inner(torch.sin(x * 5000.3))",
        inputs="torch.randint(-8, 8, (4, 16)) / 8",
        kinds=("rule",),
    ),
    Case(
        "asked for more than bfloat16 has",
        "return self.down(self.norm(self.up(x)))",
        NORMED,
        never=("dtype",),
        kinds=("rule",),
        options={"min_sqnr": 58.0},
    ),
]

ELSEWHERE = [
    Case(
        "another fault elsewhere",
        f"{SPREAD}\nh = (self.inner(x) * 1e6).relu()\nreturn torch.log(torch.softmax(z, -1)), h * 1e-5",
        rewrite=(("torch.log(torch.softmax(z, -1))", "torch.log_softmax(z, -1)"),),
        outcome="fix",
    ),
]

CASES = {
    f"{group}: {case.name}": case
    for group, cases in {
        "log_softmax": LOG_SOFTMAX,
        "log_sigmoid": LOG_SIGMOID,
        "scale": SCALE,
        "eps": EPS,
        "constant": CONSTANTS,
        "rescale": RESCALE,
        "rule": RULES,
        "elsewhere": ELSEWHERE,
    }.items()
    for case in cases
}
