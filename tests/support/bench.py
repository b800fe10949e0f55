"""Sources to benchmark, and the rows of a run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from ampaudit.audit.inputs import as_source
from ampaudit.benchmarking.run import bench
from ampaudit.core.source_config import SourceConfig
from ampaudit.report.bench import BenchRow
from ampaudit.source import ModelSource
from ampaudit.source.open import open_source
from tests.support.paths import ROOT


def bert(train: bool) -> ModelSource:
    from transformers import BertConfig, BertModel

    config = BertConfig(
        num_hidden_layers=2, hidden_size=128, num_attention_heads=4, intermediate_size=512, vocab_size=2000
    )
    made = as_source(BertModel(config).train(train), batches=[{"input_ids": torch.randint(0, 2000, (8, 32))}])
    return replace(made, loss=lambda output: output.last_hidden_state.float().square().mean())


def resnet(train: bool) -> ModelSource:
    from transformers import ResNetConfig, ResNetForImageClassification

    config = ResNetConfig(embedding_size=32, hidden_sizes=[32, 64, 128], depths=[1, 1, 1], layer_type="basic")
    pixels = {"pixel_values": torch.randn(4, 3, 48, 48)}
    made = as_source(ResNetForImageClassification(config).train(train), batches=[pixels])
    return replace(made, loss=lambda output: output.logits.float().square().mean())


def example(name: str) -> Callable[[bool], ModelSource]:
    return lambda train: open_source(str(ROOT / "examples" / name), SourceConfig(train=train))


def rows_of(source: ModelSource, modes: str, **options: object) -> dict[str, BenchRow]:
    report = bench(source, modes=modes.split(","), repeats=1, **options)  # type: ignore[arg-type]
    return {row.mode: row for row in report.rows}
