"""Tables of names of torch and related packages, each under one canonical name.

Sources: documentation and code of Accelerate 1.0 to 1.12, Lightning and Fabric 2.0 to 2.6,
DeepSpeed 0.9 to 0.18, the Trainer of Transformers 4.30 to 4.57, and Catalyst 22.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

FLOAT16_ROUNDS_TO_ZERO: Final = 2.0**-25  # half of the smallest positive number; this and less rounds to zero
BFLOAT16_ROUNDS_TO_ONE: Final = 2.0**-9
FLOAT16_ROUNDS_TO_ONE: Final = 2.0**-12  # half of the distance from 1 to the next smaller number
AUTOCASTS: Final = {
    "torch.autocast": None,
    "torch.amp.autocast": None,
    "torch.cuda.amp.autocast": "cuda",
    "torch.cpu.amp.autocast": "cpu",
}
SCALERS: Final = frozenset(
    {
        "torch.amp.GradScaler",
        "torch.GradScaler",
        "torch.cuda.amp.GradScaler",
        "torch.cpu.amp.GradScaler",
        "torch.distributed.fsdp.sharded_grad_scaler.ShardedGradScaler",
    }
)
DTYPES: Final = {
    "torch.float16": "float16",
    "torch.half": "float16",
    "torch.bfloat16": "bfloat16",
    "torch.float32": "float32",
    "torch.float": "float32",
    "torch.float64": "float64",
    "torch.double": "float64",
}
# names that scripts use so regularly that a snippet without its imports can be read
CONVENTIONAL_NAMES: Final = {
    "torch": "torch",
    "nn": "torch.nn",
    "F": "torch.nn.functional",
    "optim": "torch.optim",
    "autocast": "torch.autocast",
    "GradScaler": "torch.amp.GradScaler",
    "DDP": "torch.nn.parallel.DistributedDataParallel",
    "clip_grad_norm_": "torch.nn.utils.clip_grad_norm_",
    "clip_grad_value_": "torch.nn.utils.clip_grad_value_",
    "nullcontext": "contextlib.nullcontext",
}
# autocast's list of matrix products; source: torch, "Automatic Mixed Precision package", op reference
MATRIX_PRODUCTS: Final = frozenset(
    {f"torch.{n}" for n in "matmul mm bmm einsum addmm addbmm baddbmm mv chain_matmul".split()}
    | {f"torch.nn.functional.{n}" for n in "linear conv1d conv2d conv3d scaled_dot_product_attention".split()}
    | {"torch.linalg.vecdot", "torch.linalg.multi_dot"}
)
# ops that return the dtype of their input
KEEPS_DTYPE: Final = frozenset(
    "mean amax amin max min abs neg relu relu6 leaky_relu elu gelu silu mish hardswish tanh sigmoid"
    " clamp clip clamp_min clamp_max select index_select gather view reshape squeeze unsqueeze flatten"
    " transpose permute contiguous to cuda cpu clone requires_grad_ expand repeat chunk split t"
    " T sqrt square flip roll dropout interpolate pad max_pool1d max_pool2d max_pool3d avg_pool2d"
    " avg_pool3d adaptive_avg_pool2d cat stack concat where minimum maximum detach".split()
)
# functions that make tensors, and whether these are float32 if no dtype is given
MAKES_TENSORS: Final = {
    **dict.fromkeys("zeros ones empty rand randn linspace logspace eye".split(), True),
    **dict.fromkeys("arange full tensor".split(), False),
}
# methods that write into a tensor and convert nothing; tried on torch 2.13: each raises for two dtypes
WRITES_SAME_DTYPE: Final = frozenset(
    "index_add_ index_copy_ index_put_ scatter_ scatter_add_ scatter_reduce_ masked_scatter_".split()
)
# and ops that autocast on CUDA computes in float32; source: torch, "Automatic Mixed Precision package"
AUTOCAST_FLOAT32: Final = frozenset(
    "acos asin cosh cumprod cumsum dist erfinv exp expm1 group_norm layer_norm log log10 log1p log2"
    " log_softmax logsumexp nll_loss norm normalize pdist pow prod reciprocal renorm rsqrt sinh softmax"
    " softmin softplus sum tan".split()
)
# LAPACK has no 16-bit routines, and autocast does not list these; tried on torch 2.13: each raises
WITHOUT_HALF_KERNEL: Final = frozenset(
    {
        f"torch.linalg.{n}"
        for n in "inv det slogdet svd svdvals eig eigh eigvals eigvalsh qr cholesky lu solve lstsq pinv"
        " inv_ex cholesky_ex matrix_rank".split()
    }
    | {f"torch.{n}" for n in "inverse det logdet slogdet svd qr cholesky pinverse".split()}
)
# the same for modules: those that end in a matrix product; those that pass on the dtype of their input
MATRIX_LAYERS: Final = frozenset(
    "Linear Conv1d Conv2d Conv3d ConvTranspose1d ConvTranspose2d ConvTranspose3d".split()
)
LAYERS_WITHOUT_DTYPE: Final = frozenset(
    "ReLU ReLU6 LeakyReLU ELU GELU SiLU Mish Hardswish Tanh Sigmoid Dropout Dropout2d "
    "Identity Flatten Unflatten"
    " MaxPool1d MaxPool2d MaxPool3d AvgPool2d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveMaxPool2d"
    " BatchNorm1d BatchNorm2d BatchNorm3d PixelShuffle ZeroPad2d ReflectionPad2d".split()
)
LOSS_FUNCTIONS: Final = frozenset(
    "cross_entropy nll_loss mse_loss l1_loss smooth_l1_loss huber_loss kl_div binary_cross_entropy"
    " binary_cross_entropy_with_logits cosine_embedding_loss ctc_loss hinge_embedding_loss"
    " margin_ranking_loss multi_margin_loss multilabel_margin_loss multilabel_soft_margin_loss"
    " poisson_nll_loss gaussian_nll_loss soft_margin_loss triplet_margin_loss".split()
)
# optimizers whose eps is added to a root of the same dtype as the parameters: name to default
ADAM_LIKE: Final = {
    **dict.fromkeys("Adam AdamW NAdam RAdam Adamax SparseAdam RMSprop".split(), 1e-8),
    "Adagrad": 1e-10,
}
# classes and functions whose results have the entries of a dict as attributes
NAMESPACES: Final = (
    "types.SimpleNamespace",
    "argparse.Namespace",
    "easydict.EasyDict",
    "munch.Munch",
    "addict.Dict",
    "ml_collections.ConfigDict",
    "omegaconf.OmegaConf.create",
    "omegaconf.DictConfig",
)
# packages that enter autocast and scale the loss themselves
MANAGING_PACKAGES: Final = (
    "accelerate",
    "lightning",
    "pytorch_lightning",
    "lightning_fabric",
    "deepspeed",
    "apex",
    "ignite",
    "catalyst",
    "speechbrain",
    "composer",
    "colossalai",
    "fairscale",
    "transformers.Trainer",
    "transformers.trainer",
)
# calls that do nothing to gradients, whatever object they are methods of: logs, meters, bars
HARMLESS_METHODS: Final = frozenset(
    "update log info debug warning error print append add_scalar add_scalars add set_postfix"
    " set_postfix_str set_description write format join items keys values len extend log_metrics"
    " log_dict synchronize_between_processes wait_until_finished record start stop end elapsed_time"
    " increment observe put send to item tolist numpy cpu cuda detach size dim numel synchronize".split()
)


@lru_cache(maxsize=4096)
def canonical_name(path: str) -> str:
    """Return the canonical name of an object that has several."""
    for old, new in _ALIASES:
        if path == old or path.startswith(old + "."):
            path = new + path[len(old) :]
    return path


_ALIASES: Final = (
    ("torch.cuda.amp.autocast_mode", "torch.cuda.amp"),
    ("torch.cuda.amp.grad_scaler", "torch.cuda.amp"),
    ("torch.cpu.amp.autocast_mode", "torch.cpu.amp"),
    ("torch.amp.autocast_mode", "torch.amp"),
    ("torch.amp.grad_scaler", "torch.amp"),
    ("torch.amp.autocast", "torch.autocast"),
    ("torch.autograd.function.Function", "torch.autograd.Function"),
    ("torch.nn.utils.clip_grad", "torch.nn.utils"),
    ("torch.nn.parallel.distributed.DistributedDataParallel", "torch.nn.parallel.DistributedDataParallel"),
    ("torch.nn.DataParallel", "torch.nn.parallel.DataParallel"),
    ("torch.nn.parallel.data_parallel.DataParallel", "torch.nn.parallel.DataParallel"),
    ("torch.nn.modules.loss", "torch.nn"),
    ("torch.special.log_softmax", "torch.log_softmax"),
)
# packages whose networks end in a matrix product or a convolution
NETWORKS: Final = (
    "torchvision.models.",
    "timm.create_model",
    "timm.models.",
    "segmentation_models_pytorch.",
    "monai.networks.nets.",
)
_PRETRAINED: Final = ("transformers.", "diffusers.")
_NO_MODELS: Final = re.compile(r"Tokenizer|Processor|Config|Extractor|Scheduler|Pipeline")
_OPTIMIZERS: Final = re.compile(
    r"(?:Fused|Paged|CPU|DeepSpeedCPU)?(?:Ada(?:m|factor|grad|belief|Bound|n)|SGD|Lion|L[Aa][Mm][Bb]|LARS|NAdam"
    r"|RAdam|RMS[Pp]rop|Prodigy|NovoGrad|Shampoo|SOAP|Muon|Ranger|Sophia)(?:W|\d+bit|[A-Z]\w*)*"
)


def makes_optimizer(path: str) -> bool:
    """Return whether a call of a dotted name outside torch makes an optimizer, by its class's name."""
    name = path.rpartition(".")[2]
    return _OPTIMIZERS.fullmatch(name) is not None or path.startswith("timm.optim.create_optimizer")


def makes_model(path: str) -> bool:
    """Return whether a call of a dotted name makes or loads a model."""
    loads = path.startswith(_PRETRAINED) and path.endswith((".from_pretrained", ".from_config"))
    return path.startswith(NETWORKS) or (loads and _NO_MODELS.search(path) is None)


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
    bases: tuple[str, ...] = ()
    step: str = ""


# precisions under which a framework calls models in autocast, and its dtype
AUTOCAST_PRECISIONS: Final[dict[object, str]] = {
    **dict.fromkeys(("fp16", "16-mixed", "16", 16), "float16"),
    **dict.fromkeys(("bf16", "bf16-mixed"), "bfloat16"),
}
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
        unscale="accelerator.unscale_gradients(), or use them after clip_grad_norm_(...), which calls it",
        divisor="gradient_accumulation_steps",
    ),
    Framework(
        "Fabric",
        ("lightning.Fabric", "lightning.fabric.Fabric", "lightning_fabric.Fabric"),
        "precision",
        *_BY_LIGHTNING,
        "fabric.backward(loss)",
        "fabric.clip_gradients(...)",
    ),
    Framework(
        "Lightning",
        ("lightning.Trainer", "lightning.pytorch.Trainer", "pytorch_lightning.Trainer"),
        "precision",
        *_BY_LIGHTNING,
        "self.manual_backward(loss)",
        "self.clip_gradients(...)",
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
        bases=("Runner", "IRunner", "SupervisedRunner"),
        step="handle_batch",
    ),
)
