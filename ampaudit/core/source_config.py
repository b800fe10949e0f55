"""The options for loading a model and its inputs."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from annotated_types import Ge

from ampaudit.core.config import Config, FilePath, Option, Seed, Texts, Trust, long_flag, python_only
from ampaudit.core.errors import InputError, WeightsError
from ampaudit.core.untrusted import describe

CONFIG_FILE = "config.json"
# how a model of Transformers is built in a sandbox, before its weights are loaded
REHEARSAL = "ampaudit.source.huggingface:rehearse"
REHEARSAL_ENVIRONMENT = {
    "CUDA_VISIBLE_DEVICES": "",
    "OMP_NUM_THREADS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}
REHEARSAL_IMPORTS = (  # in the process that starts it as well
    "transformers.modeling_utils",
    "transformers.models.auto.modeling_auto",
    "transformers.models.auto.processing_auto",
)

BatchCount = Annotated[
    int | None,
    Ge(1),
    Option("Number of batches; by default 1, up to 16 of sample files, or all recorded calls."),
]
TextFile = Annotated[FilePath | None, Option("Texts or chats for the model's tokenizer.", metavar="FILE")]
ImageDirectory = Annotated[FilePath | None, Option("Images for the model's image processor.", metavar="DIR")]
AudioDirectory = Annotated[
    FilePath | None, Option("Recordings for the model's feature extractor.", metavar="DIR")
]


class SourceConfig(Config):
    """Options for loading a model and its inputs."""

    weights: Annotated[
        FilePath | None, Option("Checkpoint: safetensors, or .pt state_dict.", metavar="FILE")
    ] = None
    inputs: Annotated[
        FilePath | None,
        Option(
            "Python file with example_inputs() or batches(), and loss(); safetensors or, for ONNX, .npz; "
            "or recorded calls.",
            metavar="PATH",
        ),
    ] = None
    args: Annotated[
        str, Option("Arguments of the class or factory after the colon: 3,10,width=64.", file=False)
    ] = ""
    input: Annotated[
        Texts,
        Option(
            "Random input, [NAME=]SIZES[:DTYPE][@RANGE]: 8x3x32x32, or ids=2x77:int64@49408. Repeatable.",
            metavar="SPEC",
            file=False,
        ),
    ] = ()
    text: TextFile = None
    images: ImageDirectory = None
    audio: AudioDirectory = None
    batches: BatchCount = None
    seed: Seed = 0
    train: Annotated[bool, Option("The model's mode; --eval is the default.", flags=("--train/--eval",))] = (
        False
    )
    stream: Annotated[bool, Option("Leave weights on disk until an op needs them.")] = False
    trust: Trust = False
    input_sizes: Annotated[
        Mapping[str, int] | None, python_only("Sizes of generated inputs by axis, for a sweep.")
    ] = None

    def check(self) -> None:
        """Raise early for a file that does not exist.

        Raises:
            WeightsError, InputError: A file does not exist.
        """
        for name, field in type(self).model_fields.items():
            path = getattr(self, name)
            if isinstance(path, Path) and not path.exists():
                error = WeightsError if name == "weights" else InputError
                flag = long_flag(name, field)
                raise error(
                    f"{describe(path)}: No such file or directory", hint=f"check the path after {flag}"
                )
