"""Token ids and classes beyond their tables: every command names the input, and none calls it internal."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import ampaudit
from ampaudit.core.errors import InputError, SourceError
from ampaudit.core.source_config import SourceConfig

Write = Callable[[str], Path]

TOKENS = """
class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.table, self.out = nn.Embedding(10, 8), nn.Linear(8, 4)

    def forward(self, input_ids):
        return self.out(LOOKUP)

def get_model():
    return Model()

def example_inputs():
    return {"input_ids": torch.tensor([[1, 30522]])}

def loss(output):
    return output.sum()
"""
LOOKUPS = {
    "embedding": "self.table(input_ids)",
    "index": "self.table.weight[input_ids]",
    "select": "self.table.weight.index_select(0, input_ids[0])",
    "gather": "self.table.weight.gather(0, input_ids.T.expand(2, 8))",
    "one hot": "torch.nn.functional.one_hot(input_ids, 10).float()[..., :8]",
}
SECOND = """
def batches():
    for index in (1, 2, 30522):
        yield {"input_ids": torch.tensor([[1, index]])}
"""
COMMANDS: dict[str, Callable[..., Any]] = {
    "scan": lambda path, out: ampaudit.scan(path),
    "scan --backward": lambda path, out: ampaudit.scan(path, backward=True),
    "scan two policies": lambda path, out: ampaudit.scan(path, policy="half"),
    "plan": lambda path, out: ampaudit.plan(path),
    "convert": lambda path, out: ampaudit.convert(path, None, out / "converted"),
    "train": lambda path, out: ampaudit.train(path, steps=2),
    "bench": lambda path, out: ampaudit.bench(path, modes=["fp32"]),
}


@pytest.mark.parametrize("lookup", LOOKUPS)
def test_a_token_beyond_the_vocabulary(model_file: Write, lookup: str) -> None:
    path = model_file(TOKENS.replace("LOOKUP", LOOKUPS[lookup]))
    with pytest.raises(InputError, match=r"input_ids from 1 to 30,522") as caught:
        ampaudit.scan(str(path))
    assert caught.value.exit_code == 2
    assert f"{path}:" in str(caught.value)


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_names_the_input(model_file: Write, tmp_path: Path, command: str) -> None:
    path = model_file(TOKENS.replace("LOOKUP", LOOKUPS["embedding"]))
    with pytest.raises(InputError, match=r"from 1 to 30,522"):
        COMMANDS[command](str(path), tmp_path)


def test_a_class_beyond_the_outputs(model_file: Write) -> None:
    path = model_file(
        "def get_model():\n    return nn.Linear(8, 4)\n"
        "def batches():\n    yield torch.randn(2, 8), torch.tensor([1, 7])\n"
        "def model_inputs(batch):\n    return batch[0]\n"
        "def loss(output, batch):\n    return nn.functional.cross_entropy(output, batch[1])\n"
    )
    with pytest.raises(InputError, match=r"item\[1\] from 1 to 7"):
        ampaudit.train(str(path), steps=2)


def test_an_index_of_the_model_is_no_input_error(model_file: Write) -> None:
    lookup = "self.table((self.out.weight.sum() * 0 + 30522).long().expand(2))"
    path = model_file(
        TOKENS.replace("LOOKUP", lookup).replace("torch.tensor([[1, 30522]])", "torch.randn(2, 8)")
    )
    with pytest.raises(SourceError, match=r"\.py:\d+: the model itself fails.* index out of range"):
        ampaudit.scan(str(path))


def test_what_the_model_raises_in_training_is_its_own(model_file: Write) -> None:
    path = model_file(TOKENS.replace("LOOKUP", '{}["no such key"]'))
    with pytest.raises(SourceError, match=r"KeyError: 'no such key'"):
        ampaudit.train(str(path), steps=2)
    assert [row.status for row in ampaudit.bench(str(path), modes=["fp32"]).rows] == ["failed"]


@pytest.mark.parametrize("options", [{}, {"memory": "1GB"}])
def test_the_batch_is_named_if_there_are_several(model_file: Write, options: dict[str, str]) -> None:
    text = TOKENS.replace("LOOKUP", LOOKUPS["embedding"])
    path = model_file(text[: text.index("def example_inputs")] + SECOND)
    with pytest.raises(InputError, match=r"from 1 to 30,522 \(in batch 3\)\n"):
        ampaudit.scan(str(path), source=SourceConfig(batches=3), **options)
