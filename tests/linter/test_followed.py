"""What the flow follows: items of dicts, tests for a scaler, copies of models, unknown helpers."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

from ampaudit.findings.finding import Severity
from tests.linter.examples import lint
from tests.support.clock import soon

HEAD = "import copy\nimport torch\nimport torch.nn.functional as F\nfrom helpers import clip_gradients\n\n\n"
TRAIN = """
def train(model, loader, path, amp=True):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    {before}
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda", dtype=torch.float16):
            loss = F.cross_entropy(model(x), y)
        scaler.scale(loss).backward()
        {clip}
        {step}
        scaler.update()
    {after}
"""
STEP = "scaler.step(optimizer)"
SAVED = [
    "state = {'epoch': 3}",
    "state['model'] = model.state_dict()",
    "if amp:",
    "    state['optimizer'] = optimizer.state_dict()",
    "torch.save(state, path)",
    "if resume: optimizer.load_state_dict(read['optimizer']); scaler.load_state_dict(read['scaler'])",
]


def loop(*, before: str = "", clip: str = "", step: str = STEP, after: list[str] | None = None) -> str:
    text = TRAIN.format(before=before, clip=clip, step=step, after="\n    ".join(after or ["pass"]))
    return HEAD + text


def found(text: str) -> dict[str, Severity]:
    linted = lint(text)
    assert not linted.unread
    return {f.code: f.severity for f in linted.findings if f.severity != Severity.NOTE}


def test_what_an_unknown_helper_clips_is_likely_still_scaled() -> None:
    assert found(loop(clip="clip_gradients(model, 1.0)")) == {"AMP807": Severity.WARNING}
    assert found(loop(clip="clip_gradients(model.parameters(), 1.0)")) == {"AMP807": Severity.WARNING}


@pytest.mark.parametrize(
    "clip",
    [
        "clip_gradients(model, scaler, 1.0)",
        "clip_gradients(optimizer, 1.0)",
        "clip_gradients(1.0)",
        "scaler.unscale_(optimizer); clip_gradients(model, 1.0)",
        "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0 * scaler.get_scale())",
    ],
)
def test_clipping_that_may_be_right_is_left_alone(clip: str) -> None:
    assert found(loop(clip=clip)) == {}


def test_items_that_are_set_later_are_part_of_a_checkpoint() -> None:
    assert found(loop(after=SAVED)) == {"AMP820": Severity.WARNING}
    with_scaler = [*SAVED[:-2], "state['scaler'] = scaler.state_dict()", *SAVED[-2:]]
    assert found(loop(after=with_scaler)) == {}
    assert found(loop(after=[*SAVED[:2], *SAVED[-2:]])) == {}


def test_an_optimizer_is_known_by_its_key() -> None:
    before = "both = {'a': optimizer, 'b': optimizer}"
    again = "scaler.step(both['a']); scaler.step(both['b'])"
    assert found(loop(before=before, step=again)) == {"AMP809": Severity.ERROR}
    other = "both = {'a': optimizer, 'b': torch.optim.SGD(other.parameters(), lr=1.0)}"
    assert "AMP809" not in found(loop(before=other, step=again))
    changed = before + "; both['b'] = make()"
    assert "AMP809" not in found(loop(before=changed, step=again))


def test_a_test_for_a_scaler_is_decided_where_it_is_there() -> None:
    always = "if scaler is not None: scaler.step(optimizer)\n        else: optimizer.step()"
    assert found(loop(step=always)) == {}
    unscaled = "if scaler is None: scaler.step(optimizer)\n        else: optimizer.step()"
    assert found(loop(step=unscaled)) == {"AMP803": Severity.ERROR}


def test_gradients_that_are_replaced_may_have_any_scale() -> None:
    clip = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"
    replaced = "for p in model.parameters(): p.grad = merged(p)"
    assert found(loop(clip=clip)) == {"AMP807": Severity.ERROR}
    assert found(loop(clip=f"{replaced}\n        {clip}")) == {}


def test_a_copy_of_a_model_is_another_model() -> None:
    text = loop(after=["half = model.half()", "scaler.step(optimizer)"])
    copied = loop(after=["half = copy.deepcopy(model).half()", "half(1)"])
    assert "AMP801" in found(text)
    assert found(copied) == {}


def test_gradients_of_a_step_for_every_batch_are_zeroed_for_every_batch() -> None:
    gated = loop().replace("for x, y in loader:", "for i, (x, y) in enumerate(loader):")
    gated = gated.replace(
        "        optimizer.zero_grad()", "        if i % 4 == 0:\n            optimizer.zero_grad()"
    )
    assert found(gated) == {"AMP839": Severity.ERROR}
    both = gated.replace(
        f"        {STEP}", f"        if i % 4 == 3:\n            {STEP}\n            scaler.update()"
    )
    both = both.replace("        scaler.update()\n    pass", "    pass")
    assert "AMP839" not in found(both)
    by_hand = gated.replace(
        f"        {STEP}", f"        {STEP}\n        for p in model.parameters(): p.grad = None"
    )
    assert found(by_hand) == {}


def test_a_loss_needs_the_scaler_that_steps() -> None:
    second = "other = torch.amp.GradScaler('cuda')"
    assert found(loop(before=second, step="other.step(optimizer)")).get("AMP815") == Severity.ERROR


ACCUMULATED_TWICE = """
import torch


def run(model, loader, opt, scaler, accum=8):
    for it, (x, y) in enumerate(loader):
        with torch.autocast("cuda"):
            loss = torch.nn.functional.mse_loss(model(x), y) / accum
        scaler.scale(loss).backward()
        if it % accum == accum - 1:
            scaler.step(opt)
            scaler.update()
        if {again}:
            opt.zero_grad(set_to_none=True)
"""


@pytest.mark.parametrize("again", ["it % accum == accum - 1", "(it + 1) % accum == 0"])
def test_a_condition_on_a_count_may_be_written_again(again: str) -> None:
    found = lint(ACCUMULATED_TWICE.format(again=again)).findings
    assert not [f.code for f in found if f.severity != "note"]


UNSCALED_BY_HAND = """
import torch


def run(model, loader, opt, scaler):
    for x, y in loader:
        opt.zero_grad()
        with torch.autocast("cuda"):
            loss = torch.nn.functional.mse_loss(model(x), y)
        scaler.scale(loss).backward()
        factor = {factor}
        norm = torch.stack([(p.grad {op} factor).norm() for p in model.parameters()]).norm()
        print(norm)
        scaler.step(opt)
        scaler.update()
"""


@pytest.mark.parametrize(
    ("factor", "op", "codes"),
    [
        ("1.0 / scaler.get_scale()", "*", set()),
        ("scaler.get_scale()", "/", set()),
        ("0.5", "*", {"AMP808"}),
    ],
)
def test_gradients_may_be_divided_by_the_scale_itself(factor: str, op: str, codes: set[str]) -> None:
    found = lint(UNSCALED_BY_HAND.format(factor=factor, op=op)).findings
    assert {f.code for f in found if f.severity != "note"} == codes


TWO_SCALERS = """
import torch


class Pair:
    def __init__(self, net_g, net_d):
        self.net_g, self.net_d = net_g, net_d
        self.opt_g = torch.optim.Adam(net_g.parameters())
        self.opt_d = torch.optim.Adam(net_d.parameters())
        self.scaler_g = torch.amp.GradScaler("cuda")
        self.scaler_d = torch.amp.GradScaler("cuda")

    def step(self, x):
        self.opt_d.zero_grad()
        with torch.autocast("cuda"):
            loss_d = self.net_d(x).mean()
        self.scaler_d.scale(loss_d).backward()
        self.scaler_d.step(self.opt_d)
        self.scaler_d.update()
        self.opt_g.zero_grad()
        with torch.autocast("cuda"):
            loss_g = self.net_d(self.net_g(x)).mean()
        self.scaler_g.scale(loss_g).backward()
        self.{unscaled}.unscale_(self.opt_g)
        torch.nn.utils.clip_grad_norm_(self.net_g.parameters(), 1.0)
        self.scaler_g.step(self.opt_g)
        self.scaler_g.update()

    def save(self):
        states = {{"g": self.opt_g.state_dict(), "d": self.opt_d.state_dict(),
                  "s": self.scaler_g.state_dict(){more}}}
        torch.save(states, "last.pt")
"""
BOTH = ', "t": self.scaler_d.state_dict()'


@pytest.mark.parametrize(
    ("unscaled", "more", "expected"),
    [
        ("scaler_g", BOTH, []),
        ("scaler_d", BOTH, [("AMP815", 24, "error")]),
        ("scaler_g", "", [("AMP820", 30, "warning")]),
    ],
)
def test_two_scalers_are_kept_apart(unscaled: str, more: str, expected: list[tuple[str, int, str]]) -> None:
    found = lint(TWO_SCALERS.format(unscaled=unscaled, more=more)).findings
    assert [(f.code, f.line, str(f.severity)) for f in found if f.severity != "note"] == expected


def test_items_whose_keys_are_not_known_do_not_double_at_each_join() -> None:
    steps = "".join(f"        if x[{n}]:\n            kept[x[{n}]] = y\n" for n in range(40))
    loop = f"with torch.autocast('cuda'):\n    kept = {{}}\n    for x, y in loader:\n{steps}"
    with soon():
        assert not lint(f"import torch\n\n{loop}").findings


@pytest.mark.parametrize(("call", "codes"), [("", set()), (", clip=1.0", {"AMP807"})])
def test_a_positional_argument_is_no_keyword_only_one(call: str, codes: set[str]) -> None:
    helper = """
def update(loss, model, scaler, *optimizers, clip=None):
    scaler.scale(loss).backward()
    if clip is not None:
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
    for optimizer in optimizers:
        scaler.step(optimizer)
    scaler.update()
"""
    body = loop(step="pass").replace(
        "scaler.scale(loss).backward()", f"update(loss, model, scaler, optimizer{call})"
    )
    text = body.replace("        scaler.update()\n", "", 1).replace(
        "\n\n\ndef train", f"\n\n{helper}\n\ndef train", 1
    )
    assert set(found(text)) == codes


HELPER = """
def train_batch(model, optimizer, scaler, x, y, settings, use_amp=True):
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.float16):
        loss = model(x, y)
    scaler.scale(loss).backward()
    if {condition}:
        scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
"""


@pytest.mark.parametrize(
    "condition", ["scaler is not None", "scaler", "scaler.is_enabled()", "use_amp", "settings.fp16"]
)
def test_a_scaler_of_the_caller_may_be_off_where_a_setting_is(condition: str) -> None:
    assert found(HEAD + HELPER.format(condition=condition)) == {}
    later = HELPER.format(condition=condition).replace("scaler.unscale_(optimizer)", "pass")
    assert set(found(HEAD + later)) == {"AMP807"}


LOADED = """import torch
from transformers import AutoModelForCausalLM


def evaluate(model, batches, ids):
    for batch in batches:
        logits = model(**batch).logits
        {use}


model = AutoModelForCausalLM.from_pretrained("name", torch_dtype=torch.{dtype})
evaluate(model, [], [1, 2])
"""


@pytest.mark.parametrize(
    ("use", "dtype", "code"),
    [
        ("scores = logits[:, -1, ids].cpu().numpy()", "bfloat16", {"AMP846"}),
        ("scores = logits[:, -1, ids].cpu().numpy()", "float16", set()),
        ("scores = logits.float().cpu().numpy()", "bfloat16", set()),
        ("tokens = logits.argmax(-1).cpu().numpy()", "bfloat16", set()),
        ("losses = model(**batch).loss.cpu().numpy()", "bfloat16", set()),
    ],
)
def test_numpy_takes_no_output_of_a_model_in_bfloat16(use: str, dtype: str, code: set[str]) -> None:
    assert set(found(LOADED.format(use=use, dtype=dtype))) == code


ADAPTED = """import torch
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM

model = AutoModelForCausalLM.from_pretrained("name", torch_dtype=torch.{dtype})
model = get_peft_model(model, LoraConfig())
{cast}
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
scaler = torch.amp.GradScaler("cuda")
for batch in []:
    optimizer.zero_grad()
    with torch.autocast("cuda", dtype=torch.{dtype}):
        loss = model(**batch).loss
    scaler.scale(loss).backward()
    scaler.step(optimizer)
    scaler.update()
scores = model(**batch).logits.detach().cpu().numpy()
"""


@pytest.mark.parametrize(
    ("dtype", "cast", "code"),
    [
        ("float16", "", set()),
        ("float16", "model.half()", {"AMP801", "AMP862"}),
        ("bfloat16", "", {"AMP818", "AMP846"}),
        ("bfloat16", "model.float()", {"AMP818"}),
        ("bfloat16", "model.bfloat16()", {"AMP818", "AMP846"}),
    ],
)
def test_adapters_are_in_float32_until_the_model_is_cast(dtype: str, cast: str, code: set[str]) -> None:
    assert set(found(ADAPTED.format(dtype=dtype, cast=cast))) == code


WRITTEN = """import torch
from torch import nn

layer = nn.Linear(9, 64).cuda()
for x, rows in loader:
    with torch.autocast("cuda", dtype=torch.bfloat16):
        canvas = torch.zeros(64, 64, device="cuda")
        canvas{index} = layer(x)
"""


@pytest.mark.parametrize(
    ("index", "code"),
    [("[:, rows.long()]", {"AMP874"}), ("[rows > 0]", {"AMP874"}), ("[:, 0]", set()), ("[0]", set())],
)
def test_an_assignment_by_a_tensor_casts_nothing(index: str, code: set[str]) -> None:
    """``index_put_`` wants one dtype, and ``copy_`` takes any."""
    assert set(found(WRITTEN.format(index=index))) == code
    canvas, rows = torch.zeros(8, 8), torch.arange(8)
    indices = {"[:, rows.long()]": (slice(None), rows), "[rows > 0]": rows > -1, "[:, 0]": (slice(None), 0)}
    value = torch.ones(8, 8, dtype=torch.bfloat16)
    if code:
        with pytest.raises(RuntimeError, match="dtypes match"):
            canvas[indices[index]] = value
    else:
        canvas[indices.get(index, 0)] = value[0]


ENGINE = """import deepspeed
import torch
import torchvision
from torch.utils.data import DataLoader
from torchvision import transforms

model = torchvision.models.resnet18()
images = torchvision.datasets.CIFAR10("data", transform=transforms.ToTensor())
loader = DataLoader(images, batch_size=8{loader})
engine, *_ = deepspeed.initialize(model=model, config={{"{form}": {{"enabled": {enabled}{more}}}}})
for x, y in loader:
    logits = engine(x.to({to}))
    engine.backward(torch.nn.functional.cross_entropy(logits.float(), y))
    engine.step()
"""


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({}, {"AMP874"}),
        ({"form": "bf16"}, {"AMP874"}),
        ({"enabled": "False"}, set()),
        ({"more": ", 'auto_cast': True"}, set()),
        ({"to": "engine.device, torch.half"}, set()),
        ({"to": "engine.device, dtype=dtype"}, set()),
        ({"loader": ", collate_fn=collate"}, set()),
    ],
)
def test_an_engine_in_16_bits_takes_no_float32_images(changes: dict[str, str], code: set[str]) -> None:
    usual = {"form": "fp16", "enabled": "True", "more": "", "to": "engine.device", "loader": ""}
    assert set(found(ENGINE.format(**usual | changes))) == code
    with pytest.raises(RuntimeError, match=r"type|dtype"):
        torch.nn.Conv2d(3, 1, 3).bfloat16()(torch.ones(1, 3, 8, 8))


FUNCTION = """import torch
from torch.amp import custom_bwd, custom_fwd

class Double(torch.autograd.Function):
    @staticmethod
    @custom_fwd(device_type="cpu")
    def forward({first}x):
        return x * 2
{setup}
    @staticmethod
    @custom_bwd(device_type="cpu")
    def backward(ctx, gradient):
        return gradient * 2

x = torch.ones(3, requires_grad=True)
with torch.autocast("cpu"):
    y = Double.apply(x)
y.sum().backward()
"""


@pytest.mark.parametrize(
    ("first", "setup", "code"),
    [
        ("ctx, ", "", set()),
        ("", "    @staticmethod\n    def setup_context(ctx, inputs, output):\n        pass\n", {"AMP850"}),
    ],
)
def test_custom_fwd_needs_the_context(first: str, setup: str, code: set[str]) -> None:
    text = FUNCTION.format(first=first, setup=setup)
    assert set(found(text)) == code
    with pytest.raises(AttributeError) if code else nullcontext():
        exec(compile(text, "function.py", "exec"), {})


PPO = """import torch
import torch.nn.functional as F

def step(model, ids, old, optimizer):
    with torch.autocast("cuda", dtype=torch.bfloat16):
        logits = model(ids).logits
{indent}log_probs = F.log_softmax(logits{cast}, dim=-1)
    (log_probs - old).exp().mean().backward()
    optimizer.step()
"""


@pytest.mark.parametrize(
    ("indent", "cast", "code"),
    [("    ", "", {"AMP868"}), ("    ", ".float()", set()), ("        ", "", set())],
)
def test_log_probabilities_of_logits_outside_autocast(indent: str, cast: str, code: set[str]) -> None:
    """CUDA's autocast lists log_softmax among what it computes in float32."""
    assert set(found(PPO.format(indent=indent, cast=cast))) == code
    layer, x = torch.nn.Linear(4, 9), torch.ones(2, 4)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = layer(x)
    assert torch.log_softmax(logits, -1).dtype == torch.bfloat16


def test_a_mask_leaves_the_dtype_of_what_it_is_multiplied_by() -> None:
    masked = WRITTEN.replace("layer(x)", "layer(x) * (torch.arange(9) < 3)").format(index="[rows > 0]")
    assert set(found(masked)) == {"AMP874"}
    assert (torch.ones(2, dtype=torch.bfloat16) * (torch.arange(2) < 1)).dtype == torch.bfloat16
