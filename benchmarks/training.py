"""Measures what the training tools cost, as ratios within one run.

    python -m benchmarks.training [--device cpu|cuda] [--repeats 9] [--json FILE]

- ``scan --backward`` without tracing, against a plain FP32 forward and backward (target: at most 4);
- ``watch`` at every 10th step, against the bare loop (target: at most 1.03);
- ``prepare`` with O1, against torch.autocast: step time (target on CUDA: at most 1), and casts per step.
"""

from __future__ import annotations

import copy
import json
import platform
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from datetime import UTC, datetime
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

import ampaudit
from ampaudit.cli.loading import keep_freed_memory
from ampaudit.core.formats import FLOAT16
from ampaudit.instruments.backward.audit import GradientAudit
from ampaudit.policy import load_policy
from ampaudit.policy.load import StartingScale
from ampaudit.run.audit import RunConfig, Runner
from ampaudit.source import Batch
from ampaudit.trace.loss import LOSS_BATCH, WithLoss, with_input_references
from benchmarks.casts import Casts
from benchmarks.options import TINY_BERT, TINY_RESNET, parser

LIMITS = {"backward": 4.0, "watch": 1.03, "step": 1.0, "casts": 1.0}


def timed(function: Callable[[], Any], device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    function()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def ratios(ours: list[float], theirs: list[float]) -> dict[str, float]:
    """Return the median and spread of the ratios of neighboring measurements."""
    found = sorted(a / b for a, b in zip(ours, theirs, strict=True))
    return {"median": statistics.median(found), "low": found[0], "high": found[-1]}


def bert(smoke: bool) -> tuple[nn.Module, dict[str, torch.Tensor], Callable[[Any], torch.Tensor]]:
    from transformers import BertConfig, BertModel

    config = BertConfig(**(TINY_BERT if smoke else {}))
    weights = torch.sin(torch.arange(config.hidden_size).float())
    ids = {"input_ids": torch.randint(0, 30000, (4, 128))}
    return (
        BertModel(config),
        ids,
        lambda o: (o.last_hidden_state.float() * weights.to(o[0].device)).mean(),
    )


def resnet(smoke: bool) -> tuple[nn.Module, dict[str, torch.Tensor], Callable[[Any], torch.Tensor]]:
    from transformers import ResNetConfig, ResNetForImageClassification

    pixels = {"pixel_values": torch.randn(4, 3, 224, 224)}
    labels = torch.tensor([0, 1, 0, 1])
    return (
        ResNetForImageClassification(ResNetConfig(**(TINY_RESNET if smoke else {}))), pixels,
        lambda o: F.cross_entropy(o.logits.float(), labels.to(o.logits.device)),
    )  # fmt: skip


def backward(name: str, repeats: int, device: torch.device, smoke: bool) -> dict[str, Any]:
    """Time an audited batch with gradients, in multiples of the plain forward and backward."""
    torch.manual_seed(0)
    model, kwargs, loss = {"bert": bert, "resnet": resnet}[name](smoke)
    model.train()
    on_target = copy.deepcopy(model).to(device)  # the audited model stays on the CPU, where it is traced
    on_device = {key: value.to(device) for key, value in kwargs.items()}
    rules = load_policy("torch-cuda")
    # a scale at which nothing overflows: after a fault, the backward pass would be run a second time
    scale = StartingScale(256.0, False, "benchmark")
    plan = RunConfig(
        rules, rules, FLOAT16, device, recorders=(GradientAudit,), functionalize=True, loss_scale=scale
    )
    runner = Runner(WithLoss(model, loss), plan)
    batch = Batch((), {**kwargs, LOSS_BATCH: with_input_references((), kwargs, kwargs)})
    runner.prepare(batch, 0)

    def plain() -> None:
        on_target.zero_grad()
        loss(on_target(**on_device)).backward()

    for _ in range(2):
        plain()
        runner.run(batch, 0)
    ours, theirs = [], []
    for number in range(repeats):
        theirs.append(timed(plain, device))
        ours.append(timed(lambda n=number: runner.run(batch, n), device))
    gradients = runner.end_batch().parts["backward"]
    assert not gradients.origins
    return {"plain_s": statistics.median(theirs), "ratio": ratios(ours, theirs)}


def training_loop(
    watched: bool, model: nn.Module, optimizer: torch.optim.Optimizer, data: Any, steps: int
) -> None:
    with ampaudit.watch(model, optimizer, every=10) if watched else nullcontext():
        for step in range(steps):
            x, y = data[step % len(data)]
            optimizer.zero_grad()
            F.cross_entropy(model(x), y).backward()
            optimizer.step()


def watch(repeats: int, device: torch.device, steps: int) -> dict[str, Any]:
    """Time training steps of a small CNN and a transformer, with and without watching every 10th."""
    found = {}
    encoder = nn.TransformerEncoderLayer(128, 4, 512, batch_first=True)
    subjects = {
        "cnn": (
            nn.Sequential(
                nn.Conv2d(3, 32, 3, padding=1), nn.BatchNorm2d(32), nn.ReLU(), nn.MaxPool2d(2),
                nn.Conv2d(32, 64, 3, padding=1), nn.BatchNorm2d(64), nn.ReLU(), nn.AdaptiveAvgPool2d(4),
                nn.Flatten(), nn.Linear(1024, 10),
            ),
            torch.randn(64, 3, 32, 32),
        ),
        "transformer": (
            nn.Sequential(nn.TransformerEncoder(encoder, 2), nn.Flatten(), nn.Linear(32 * 128, 10)),
            torch.randn(32, 32, 128),
        ),
    }  # fmt: skip
    for name, (model, x) in subjects.items():
        model.to(device)
        data = [(x.to(device), torch.randint(0, 10, (len(x),), device=device)) for _ in range(4)]
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
        times: dict[bool, list[float]] = {False: [], True: []}
        training_loop(True, model, optimizer, data, steps // 2)
        for repeat in range(repeats):
            for watched in (False, True) if repeat % 2 else (True, False):
                call = lambda w=watched, m=model, o=optimizer, d=data: training_loop(w, m, o, d, steps)  # noqa: E731
                times[watched].append(timed(call, device))
        found[name] = {"loop_s": statistics.median(times[False]), "ratio": ratios(times[True], times[False])}
    return found


def o1(name: str, repeats: int, device: torch.device, smoke: bool) -> dict[str, Any]:
    """Compare a step of ``prepare`` with one under ``torch.autocast``: its time and its casts."""
    torch.manual_seed(0)
    model, kwargs, loss = {"bert": bert, "resnet": resnet}[name](smoke)
    model.to(device).train()
    if hasattr(model.config, "use_cache"):
        model.config.use_cache = False
    kwargs = {key: value.to(device) for key, value in kwargs.items()}
    dtype = torch.float16 if device.type == "cuda" else torch.bfloat16
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    policy = f"torch-{device.type}"
    prepared = ampaudit.prepare(model, optimizer, policy=policy, dtype=str(dtype).removeprefix("torch."))

    def ours() -> None:
        model.zero_grad()
        loss(prepared.model(**kwargs)).backward()

    def autocast() -> None:
        model.zero_grad()
        with torch.autocast(device.type, dtype=dtype):
            output = model(**kwargs)
        loss(output).backward()

    counts = []
    for call in (ours, autocast):
        call()
        with Casts() as casts:
            call()
        counts.append(casts.count)
    found: dict[str, Any] = {
        "casts": counts[0],
        "casts_autocast": counts[1],
        "casts_ratio": counts[0] / counts[1],
    }
    times: list[list[float]] = [[], []]
    for _ in range(repeats):
        for index, call in enumerate((ours, autocast)):
            times[index].append(timed(call, device))
    return found | {"step_ratio": ratios(*times), "autocast_s": statistics.median(times[1])}


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__, repeats=9)
    words.add_argument("--device", default="cpu")
    options = words.parse_args(arguments)
    names = ("bert",) if options.smoke else ("bert", "resnet")
    keep_freed_memory()
    device = torch.device(options.device)
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "machine": torch.cuda.get_device_name() if device.type == "cuda" else platform.machine(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "limits": LIMITS,
        "backward": {name: backward(name, options.repeats, device, options.smoke) for name in names},
        "watch": watch(options.repeats, device, 2 if options.smoke else 40),
        "o1": {name: o1(name, options.repeats, device, options.smoke) for name in names},
    }
    text = json.dumps(result, indent=1)
    print(text)
    if options.json:
        options.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
