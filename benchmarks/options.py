"""The options that all benchmarks share, and the sizes of models in a smoke run."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

# of Transformers' configurations
TINY_BERT = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64}
TINY_RESNET = {"embedding_size": 8, "hidden_sizes": [8, 16], "depths": [1, 1], "layer_type": "basic"}


class _Smoke(argparse.Action):
    """Turns on the smoke run, in which nothing is repeated."""

    def __call__(self, parser: object, namespace: argparse.Namespace, *_: Any) -> None:
        namespace.smoke, namespace.repeats = True, 1


def parser(description: str | None, repeats: int | None = None) -> argparse.ArgumentParser:
    """Return a parser that knows ``--json``, ``--smoke`` and, with a default, ``--repeats``."""
    options = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    if repeats is not None:
        options.add_argument("--repeats", type=int, default=repeats, help="repetitions of each measurement")
    options.add_argument("--json", type=Path, help="write the figures to a file")
    options.add_argument(
        "--smoke", action=_Smoke, nargs=0, default=False, help="run a minimal case; its figures mean nothing"
    )
    return options
