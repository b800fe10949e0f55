"""What is known of timm's scaler, Transformers' Trainer, Catalyst and SpeechBrain."""

from __future__ import annotations

import pytest

from tests.linter.examples import codes, lint


def alarms(text: str) -> list[tuple[str, str, int]]:
    found = lint(text).findings
    return [(f.code, str(f.severity), f.line) for f in found if f.severity != "note"]


TIMM = """
import torch
from timm.utils import NativeScaler


def train(model, loader, optimizer, args):
    loss_scaler = NativeScaler()
    for i, (x, y) in enumerate(loader):
        with torch.autocast("cuda"):
            loss = model(x, y)
        optimizer.zero_grad()
        {before}
        loss_scaler(loss, optimizer, parameters=model.parameters(){given})
        {after}
    torch.save({{"model": model.state_dict(), "optimizer": optimizer.state_dict(){saved}}}, "last.pt")
"""
_RESUMED = "optimizer.load_state_dict(args.state['o']); loss_scaler.load_state_dict(args.state['s'])"
WRONG_TIMM = {
    "a second step": ({"after": "optimizer.step()"}, "AMP817", 14),
    "clipping without a step": (
        {"given": ", need_update=False", "after": "torch.nn.utils.clip_grad_norm_(model.parameters(), 1)"},
        "AMP807",
        14,
    ),
    "a lost scale": ({"saved": "", "after": _RESUMED}, "AMP820", 15),
}
RIGHT_TIMM = {
    "as it is": {},
    "clipped": {"given": ", clip_grad=args.clip_grad"},
    "adaptively": {"given": ', clip_grad=0.1, clip_mode="agc"'},
    "not at all": {"given": ", clip_grad=None"},
    "now and then": {"given": ", need_update=(i + 1) % 4 == 0"},
    "second order": {"given": ", create_graph=True"},
}


def timm(before: str = "", given: str = "", after: str = "", saved: str = "") -> str:
    return TIMM.format(before=before or "pass", given=given, after=after or "pass", saved=saved)


@pytest.mark.parametrize("name", WRONG_TIMM)
def test_mistakes_beside_the_scaler_of_timm(name: str) -> None:
    parts, code, line = WRONG_TIMM[name]
    found = alarms(timm(**{"saved": ', "scaler": loss_scaler.state_dict()', **parts}))
    assert [(c, at) for c, _, at in found] == [(code, line)]


@pytest.mark.parametrize("name", RIGHT_TIMM)
def test_the_scaler_of_timm_used_rightly(name: str) -> None:
    assert alarms(timm(saved=', "scaler": loss_scaler.state_dict()', **RIGHT_TIMM[name])) == []


TRAINER = """
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments

tokenizer = AutoTokenizer.from_pretrained("tiny", torch_dtype=torch.float16)
model = AutoModelForCausalLM.from_pretrained("tiny"{loaded})
args = TrainingArguments("out"{precision})
trainer = Trainer(model, args, processing_class=tokenizer{more})
trainer.train()
"""
HALF = ", torch_dtype=torch.float16"
FP16 = ", fp16=True"
LOADED = {
    "float16 weights and its scaler": (HALF, FP16, "", [("AMP801", "error", 6)]),
    "by the newer name": (", dtype=torch.float16", FP16, "", [("AMP801", "error", 6)]),
    "perhaps with a scaler": (HALF, ", fp16=flag()", "", [("AMP801", "warning", 6)]),
    "float32 weights": ("", FP16, "", []),
    "bfloat16": (HALF, ", bf16=True", "", []),
    "no 16 bits": (HALF, ", fp16=False", "", []),
    "its default": (HALF, "", "", []),
    "adapters": (HALF, FP16, ", peft_config=adapters()", []),
    "quantized": (HALF + ", quantization_config=four_bits()", FP16, "", []),
}


@pytest.mark.parametrize("name", LOADED)
def test_weights_that_the_trainers_scaler_cannot_unscale(name: str) -> None:
    loaded, precision, more, expected = LOADED[name]
    assert alarms(TRAINER.format(loaded=loaded, precision=precision, more=more)) == expected


PREPARED = """
import torch
from accelerate import Accelerator
from diffusers import UNet2DConditionModel

accelerator = Accelerator(mixed_precision={precision})
unet = UNet2DConditionModel.from_pretrained("tiny")
dtype = torch.float32
{chosen}
unet.to(accelerator.device, dtype=dtype)
{more}
optimizer = torch.optim.SGD({trained}, lr=1e-4)
unet, optimizer, loader = accelerator.prepare(unet, optimizer, loader)
"""
BY_SETTING = {
    "branch": 'if args.precision == "fp16":\n    dtype = torch.float16',
    "expression": 'dtype = torch.float16 if args.precision == "fp16" else torch.float32',
    "default": 'dtype = {"fp16": torch.float16, "bf16": torch.bfloat16}.get(args.precision, torch.float32)',
    "item": 'dtype = {"fp16": torch.float16, "no": torch.float32}[args.precision]',
}
ALL = "unet.parameters()"


@pytest.mark.parametrize("name", BY_SETTING)
def test_weights_that_a_setting_makes_float16_for_accelerate(name: str) -> None:
    text = PREPARED.format(precision="args.precision", chosen=BY_SETTING[name], more="", trained=ALL)
    assert [(code, how) for code, how, _ in alarms(text)] == [("AMP801", "warning")]


@pytest.mark.parametrize(
    ("precision", "chosen", "more", "trained", "found"),
    [
        ('"fp16"', "dtype = torch.float16", "", ALL, [("AMP801", "error")]),
        ('"fp16"', BY_SETTING["branch"], "", ALL, [("AMP801", "warning")]),
        ('"bf16"', BY_SETTING["branch"], "", ALL, []),
        ("args.precision", "pass", "", ALL, []),
        ("args.precision", BY_SETTING["branch"], "unet.float()", ALL, []),
        ("args.precision", BY_SETTING["branch"], "", "head.parameters()", []),
        ("args.precision", BY_SETTING["branch"], "unet.add_adapter(LoraConfig())", ALL, []),
        ("args.precision", "dtype = torch.bfloat16 if args.short else torch.float32", "", ALL, []),
    ],
)
def test_when_accelerate_cannot_unscale(
    precision: str, chosen: str, more: str, trained: str, found: list[tuple[str, str]]
) -> None:
    text = PREPARED.format(precision=precision, chosen=chosen, more=more, trained=trained)
    assert [(code, how) for code, how, _ in alarms(text)] == found


MODULE = """
import lightning as L
import torch


class Pair(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch, index):
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        {before}
        optimizer.step()

    def {hook}(self, optimizer):
        {inside}

    def limit(self, optimizer):
        {helper}


trainer = L.Trainer(precision="{precision}")
"""
OURS = "torch.nn.utils.clip_grad_norm_(self.parameters(), 1.0)"
THEIRS = "self.clip_gradients(optimizer, gradient_clip_val=0.5)"


@pytest.mark.parametrize(
    ("parts", "lines"),
    [
        ({"before": OURS}, [15]),
        ({"before": THEIRS}, [15]),
        ({"before": "self.limit(optimizer)", "helper": THEIRS}, [22]),
        ({"before": "self.limit(optimizer)", "helper": OURS}, [22]),
        ({"before": THEIRS, "precision": "bf16-mixed"}, []),
        ({"inside": OURS}, []),
        ({"inside": THEIRS}, []),
        ({"inside": "self.limit(optimizer)", "helper": THEIRS}, []),
        ({"inside": "self.limit(optimizer)", "helper": OURS}, []),
        ({"inside": OURS, "hook": "configure_gradient_clipping"}, []),
        ({"inside": OURS, "hook": "anything_else"}, [19]),
    ],
)
def test_clipping_in_a_lightning_module_that_optimizes_manually(
    parts: dict[str, str], lines: list[int]
) -> None:
    defaults = {"before": "pass", "inside": "pass", "helper": "pass", "hook": "on_before_optimizer_step"}
    text = MODULE.format(**{**defaults, "precision": "16-mixed", **parts})
    assert [(code, line) for code, _, line in alarms(text)] == [("AMP807", line) for line in lines]


PARTS = """
from accelerate import Accelerator


def train(model, critic, optimizer, critic_optimizer, loader):
    accelerator = Accelerator(mixed_precision="fp16")
    model, optimizer = accelerator.prepare(model, optimizer)
    critic, critic_optimizer = accelerator.prepare(critic, critic_optimizer)
    for batches in loader:
        for x in batches:
            accelerator.backward(model(x))
            {each}
        {last}
        optimizer.step()
        optimizer.zero_grad()
        accelerator.backward(critic(x))
        accelerator.clip_grad_norm_(critic.parameters(), 1.0)
        critic_optimizer.step()
        critic_optimizer.zero_grad()
"""


def test_clipping_by_accelerate_for_each_batch_of_a_step() -> None:
    clip = "accelerator.clip_grad_norm_(model.parameters(), 1.0)"
    assert codes(PARTS.format(each=clip, last="")) == ["AMP810"]
    assert codes(PARTS.format(each="", last=f"{clip}; {clip}")) == ["AMP810"]  # it unscales all optimizers
    gated = f"if accelerator.sync_gradients: {clip}; {clip}"
    assert codes(PARTS.format(each="", last=gated)) == ["AMP810"]
    assert codes(PARTS.format(each="", last=clip)) == []


def test_fabric_computes_in_float32_unless_it_is_told() -> None:
    text = (
        "from lightning import Fabric\n\n"
        "fabric = Fabric(devices=2{})\nmodel, optimizer = fabric.setup(*make())\n"
        "for x in loader:\n    fabric.backward(model(x).sum())\n    print(model.weight.grad.norm())\n"
        "    optimizer.step()\n"
    )
    assert alarms(text.format("")) == []
    assert alarms(text.format(', precision="16-mixed"')) == [("AMP808", "warning", 7)]


@pytest.mark.parametrize(
    ("argument", "found"),
    [
        ("gradient_accumulation_steps=1", []),
        ("gradient_accumulation_steps=4", ["AMP859"]),
        ("gradient_accumulation_steps=args.accumulate", ["AMP859"]),
        ("gradient_accumulation_plugin=plugin(num_steps=4)", ["AMP859"]),
    ],
)
def test_dividing_a_loss_that_accelerate_divides(argument: str, found: list[str]) -> None:
    text = (
        "from accelerate import Accelerator\n\n"
        f"accelerator = Accelerator({argument})\n"
        "model, optimizer = accelerator.prepare(*make())\n"
        "for x in loader:\n    with accelerator.accumulate(model):\n        loss = model(x).mean()\n"
        "        loss = loss / accelerator.gradient_accumulation_steps\n"
        "        accelerator.backward(loss)\n        optimizer.step()\n        optimizer.zero_grad()\n"
    )
    assert [code for code, _, _ in alarms(text)] == found


RESUMED = """
import torch
{imported}


def train(model, loader, args):
    optimizer = {made}
    scaler = torch.amp.GradScaler("cuda")
    if args.resume:
        checkpoint = torch.load("last.pt")
        optimizer.load_state_dict(checkpoint["optimizer"])
        scaler.load_state_dict(checkpoint["scaler"])
    for batch in loader:
        with torch.autocast("cuda", dtype=torch.float16):
            loss = model(batch)
        optimizer.zero_grad()
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
    write(model, optimizer)


def write(model, held):
    torch.save({{"model": model.state_dict(), "optimizer": held.state_dict()}}, "last.pt")
"""


@pytest.mark.parametrize(
    ("imported", "made"),
    [
        ("from timm.optim import create_optimizer_v2", "create_optimizer_v2(model, opt='adamw')"),
        ("import bitsandbytes", "bitsandbytes.optim.AdamW8bit(model.parameters())"),
        ("import bitsandbytes", "bitsandbytes.optim.PagedAdamW32bit(model.parameters())"),
        ("from apex.optimizers import FusedLAMB", "FusedLAMB(model.parameters())"),
        ("from lion_pytorch import Lion", "Lion(model.parameters())"),
        ("from transformers import Adafactor", "Adafactor(model.parameters())"),
        ("from schedulefree import AdamWScheduleFree", "AdamWScheduleFree(model.parameters())"),
    ],
)
def test_optimizers_of_other_packages(imported: str, made: str) -> None:
    assert [code for code, _, _ in alarms(RESUMED.format(imported=imported, made=made))] == ["AMP820"]


STEP = """
from transformers import Trainer, TrainingArguments


class Careful(Trainer):
    def training_step(self, model, inputs, num_items_in_batch=None):
        loss = self.compute_loss(model, inputs)
        {backward}
        return loss.detach()


trainer = Careful(model(), TrainingArguments("out"{precision}))
"""
CLIPPED = "torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)"


@pytest.mark.parametrize(
    ("backward", "precision", "found"),
    [
        ("loss.backward()", FP16, [("AMP802", "error", 8)]),
        ("self.accelerator.backward(loss)", FP16, []),
        (f"self.accelerator.backward(loss); {CLIPPED}", FP16, [("AMP807", "error", 8)]),
        (f"self.accelerator.backward(loss); {CLIPPED}", ", bf16=True", []),
        ("loss.backward()", ", bf16=True", []),
        ("loss.backward()", "", []),
    ],
)
def test_a_training_step_that_bypasses_the_trainers_scaler(
    backward: str, precision: str, found: list[tuple[str, str, int]]
) -> None:
    assert alarms(STEP.format(backward=backward, precision=precision)) == found


DEVICE = """
import torch


def evaluate(args, loader):
    device = torch.device("cuda" if args.cuda else "cpu")
    model = torch.nn.Linear(3, 4).to(device)
    if args.cuda:
        torch.backends.cudnn.benchmark = True
    for x in loader:
        with torch.autocast("cuda", enabled=args.amp):
            model(x)
        if args.cuda:
            torch.cuda.synchronize()
"""


def test_a_device_that_a_setting_chooses_may_switch_autocast_too() -> None:
    assert alarms(DEVICE) == []
    always = DEVICE.replace('"cuda" if args.cuda else "cpu"', '"cpu"')
    assert [code for code, _, _ in alarms(always)] == ["AMP847"]


OPTIONAL = """
import torch


def resume(path, model, optimizer=None):
    checkpoint = torch.load(path)
    model.load_state_dict(checkpoint["model"])
    if optimizer is not None:
        optimizer.load_state_dict(checkpoint["optimizer"])


def main(model, loader):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cuda")
    resume("last.pt", model{given})
    for x, y in loader:
        optimizer.zero_grad()
        with torch.autocast("cuda"):
            loss = model(x, y)
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()
"""


def test_an_argument_that_no_call_gives_is_none() -> None:
    assert alarms(OPTIONAL.format(given="")) == []
    assert [code for code, _, _ in alarms(OPTIONAL.format(given=", optimizer"))] == ["AMP820"]


RUNNER = """
from catalyst import dl


class Custom(dl.Runner):
    def handle_batch(self, batch):
        x, y = batch
        loss = self.criterion(self.model(x), y)
        if self.is_train_loader:
            {backward}
            self.optimizer.step()
            self.optimizer.zero_grad()

    def predict_batch(self, batch):
        return self.model(batch)


Custom().train(model=net(), engine=dl.GPUEngine({precision}))
"""


@pytest.mark.parametrize(
    ("backward", "precision", "found"),
    [
        ("loss.backward()", "fp16=True", [("AMP802", "error", 10)]),
        ("loss.backward()", "fp16=flag()", [("AMP802", "warning", 10)]),
        ("self.engine.backward(loss)", "fp16=True", []),
        ("loss.backward()", "", []),
    ],
)
def test_a_batch_that_bypasses_the_scaler_of_catalyst(
    backward: str, precision: str, found: list[tuple[str, str, int]]
) -> None:
    assert alarms(RUNNER.format(backward=backward, precision=precision)) == found


BRAIN = """
import speechbrain as sb
import torch


class ASR({base}):
    def fit_batch(self, batch):
        with torch.autocast("cuda"):
            outputs = self.compute_forward(batch, sb.Stage.TRAIN)
        loss = self.compute_objectives(outputs, batch, sb.Stage.TRAIN)
        self.scaler.scale(loss / self.grad_accumulation_factor).backward()
        if self.step % self.grad_accumulation_factor == 0:
            {before}
            if self.check_gradients({given}):
                self.scaler.step(self.optimizer)
            self.scaler.update()
            self.optimizer.zero_grad()
        return loss.detach()
"""
UNSCALED = "self.scaler.unscale_(self.optimizer)"


@pytest.mark.parametrize("base", ["sb.Brain", "sb.core.Brain"])
@pytest.mark.parametrize(
    ("before", "given", "found"),
    [
        ("pass", "loss", [("AMP807", "warning", 14)]),
        (UNSCALED, "loss", []),
        ("pass", "", []),  # of version 1, where it clips nothing
    ],
)
def test_the_clipping_of_speechbrain(
    base: str, before: str, given: str, found: list[tuple[str, str, int]]
) -> None:
    assert alarms(BRAIN.format(base=base, before=before, given=given)) == found


def test_the_step_of_speechbrain_unscales_and_steps() -> None:
    start = BRAIN.index("        if self.step")
    text = BRAIN[:start] + "        self.optimizers_step()\n        return loss.detach()\n"
    assert alarms(text.format(base="sb.Brain")) == []
    assert alarms(text.format(base="sb.Brain").replace("s_step()", "s_step()\n        self.scaler.update()"))
