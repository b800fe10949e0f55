"""Facts about frameworks that scale the loss themselves: how each is made, and what to call instead of torch.

Sources: documentation and code of Accelerate 1.0 to 1.12, Lightning and Fabric 2.0 to 2.6,
DeepSpeed 0.9 to 0.18, the Trainer of Transformers 4.30 to 4.57, Ignite 0.4 to 0.5, and Catalyst 22.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["FRAMEWORKS", "Framework", "framework_of"]


@dataclass(frozen=True, slots=True)
class Framework:
    """A framework that manages precision.

    Attributes:
        name: Name in messages.
        constructors: Dotted names of the classes and functions that create its objects.
        precision: Keyword of the constructor that sets the precision.
        scaled: Precisions for which the loss is scaled.
        unscaled: Precisions for which the loss is not scaled.
        backward: Replacement of ``loss.backward()``.
        clip: Replacement of torch's clipping; empty if its configuration clips.
        unscale: Call that must precede reading gradients; empty if only clipping unscales.
        keeps_gradients: Whether ``.grad`` holds the scaled gradients after its backward.
        divisor: Setting by which its backward divides the loss; empty if it does not divide.
        is_float32: Whether float32 is the default precision.
        bases: Base classes of user-defined training loops.
        step: Method of a training loop that computes the gradients of a batch.
    """

    name: str
    constructors: tuple[str, ...]
    precision: str
    scaled: tuple[object, ...]
    unscaled: tuple[object, ...]
    backward: str
    clip: str
    keeps_gradients: bool = True
    unscale: str = ""
    divisor: str = ""
    is_float32: bool = False
    bases: tuple[str, ...] = ()
    step: str = ""


_BY_LIGHTNING: Final = (
    ("16-mixed", "16", 16),
    ("32-true", "32", 32, "bf16-mixed", "bf16", "bf16-true", "64-true", 64, "16-true"),
)
FRAMEWORKS: Final = (
    Framework(
        "Accelerate",
        ("accelerate.Accelerator",),
        "mixed_precision",
        ("fp16",),
        ("no", "bf16", "fp8"),
        "accelerator.backward(loss)",
        "accelerator.clip_grad_norm_(...)",
        unscale="accelerator.unscale_gradients()",
        divisor="gradient_accumulation_steps",
    ),
    Framework(
        "Fabric",
        ("lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric"),
        "precision",
        *_BY_LIGHTNING,
        "fabric.backward(loss)",
        "fabric.clip_gradients(...)",
        is_float32=True,
    ),
    Framework(
        "Lightning",
        ("lightning.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer"),
        "precision",
        *_BY_LIGHTNING,
        "self.manual_backward(loss)",
        "self.clip_gradients(...)",
        is_float32=True,
    ),
    Framework(
        "Trainer",
        tuple(
            f"{package}.{name}"
            for package, names in (
                ("transformers", ("TrainingArguments", "Seq2SeqTrainingArguments")),
                ("trl", ("SFTConfig", "DPOConfig", "GRPOConfig", "RewardConfig", "KTOConfig", "ORPOConfig")),
            )
            for name in names
        ),
        "fp16",
        (True,),
        (False,),
        "self.accelerator.backward(loss)",
        "the argument max_grad_norm",
        is_float32=True,
        bases=("Trainer", "Seq2SeqTrainer", "SFTTrainer"),
        step="training_step",
    ),
    Framework(
        "DeepSpeed",
        ("deepspeed.initialize",),
        "",
        (),
        (),
        "engine.backward(loss)",
        "",
        keeps_gradients=False,
        divisor="gradient_accumulation_steps",
    ),
    Framework(
        "Catalyst",
        tuple(
            f"catalyst.{package}.{name}"
            for package in ("dl", "engines", "engines.torch")
            for name in ("GPUEngine", "DataParallelEngine", "DistributedDataParallelEngine")
        ),
        "fp16",
        (True,),
        (False,),
        "self.engine.backward(loss)",
        "self.engine.clip_grad_norm_(...)",
        is_float32=True,
        bases=("Runner", "IRunner", "SupervisedRunner"),
        step="handle_batch",
    ),
)


def framework_of(path: str) -> Framework | None:
    """Return the framework whose object a call of a dotted name creates."""
    return next((one for one in FRAMEWORKS if path in one.constructors), None)
