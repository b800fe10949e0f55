"""Which architectures of Transformers run in PyTorch and are not audited.

Every third model type that Transformers knows, in alphabetical order, is built with random weights in a
small configuration: settings with the usual names of sizes are made small, in several ways until one runs by
itself. Those that run are scanned, each in a process of its own.

    python -m benchmarks.architectures [--jobs 2] [--limit 180] [--json FILE] [TYPE ...]
"""

from __future__ import annotations

import inspect
import json
import multiprocessing
import re
import threading
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any

import torch
import transformers
from torch import nn
from transformers.models.auto import modeling_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES

import ampaudit
from ampaudit.core.errors import AuditError, first_line
from ampaudit.source.processor import needed_inputs, random_input
from benchmarks.options import parser

ROWS, LENGTH = 2, 8
MAX_PARAMETERS = 20_000_000
# by the first pattern that a setting's name matches: its value, or the most that it may be
SIZES: tuple[tuple[str, int], ...] = (
    (r"vocab_size(_per_layer_input)?$", 128),
    (r"per_tok$|top_?k$|moe_k$", 2),
    (r"n_group$|topk_group$|shared_experts$|first_k_dense_replace$", 1),
    (r"experts$", 4),
    (r"key_value_heads$|kv_heads$", 2),
    (r"heads?$", 4),
    (r"^v_head_dim$", 16),  # that of queries has two parts
    (r"head_dim$|_rank$", 8),
    (r"layers?$|blocks$|depth$", 2),
    (r"intermediate|ffn|mlp_dim|inner|feedforward", 64),
    (r"hidden_size|hidden_dim|d_model$|embed|n_embd$|width$|^dim$|latent_dim|_dim$", 32),
    (r"positions|position_embeddings$|max_seq", 64),
    (r"image_size$", 32),
)
DEPTHS = re.compile(r"depths?$|layers?$|blocks$")
LENGTHS = re.compile(r"vocab_size$|layers?$|blocks$|depth$|positions|position_embeddings$")
# a process started meanwhile would inherit the other's end of a pipe, and keep it open
_STARTING = threading.Lock()
TOKEN = re.compile(r"(\w+)_(token_id|token_index|token_idx)$")


@dataclass(frozen=True, slots=True)
class Way:
    """One way to make a configuration small."""

    grouped: bool = True  # fewer heads for keys and values
    narrow: bool = True  # not only fewer layers and tokens
    wide: bool = False  # two heads of 128, for positions in several parts
    layers: int = 2
    divisor: int = 8  # of sizes in lists


WAYS = (
    *(Way(), Way(grouped=False), Way(grouped=False, layers=4)),
    *(Way(wide=True), Way(narrow=False), Way(divisor=1)),
)
WIDE = {"hidden_size": 256, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 128}


@dataclass(frozen=True, slots=True)
class Row:
    """What became of one model type.

    Attributes:
        name: the model type.
        ran: whether a small model of it ran by itself.
        code: exit code of the scan; ``None`` without one.
        reason: why it did not run, or is not audited.
    """

    name: str
    ran: bool = False
    code: int | None = None
    reason: str = ""

    @property
    def audited(self) -> bool:
        """Whether the scan ended with a verdict."""
        return self.code in (0, 1)


def selected() -> list[str]:
    """Return every third model type."""
    return sorted(CONFIG_MAPPING_NAMES)[::3]


def small(kind: type[Any], settings: Mapping[str, Any], way: Way) -> dict[str, Any]:
    """Return the settings of a configuration that are to be changed, with those of its parts."""
    made: dict[str, Any] = {}
    known = inspect.signature(kind).parameters
    for name, value in settings.items():
        if isinstance(value, Mapping) and value.get("model_type") in CONFIG_MAPPING_NAMES:
            part = transformers.CONFIG_MAPPING[value["model_type"]]
            made[name] = {"model_type": value["model_type"], **small(part, value, way)}
        elif name not in known:
            continue  # follows from others
        elif isinstance(value, list) and value and all(type(item) is int for item in value):
            if way.narrow and DEPTHS.search(name):
                made[name] = [1] * len(value)
            elif way.narrow and "heads" in name:
                made[name] = [4] * len(value)
            elif way.narrow and min(value) >= 16 and re.search("size|dim|channels", name):
                made[name] = [max(item // way.divisor, 8) for item in value]
        elif type(value) is int and value > 0 and (way.narrow or LENGTHS.search(name)):
            most = next((size for pattern, size in SIZES if re.search(pattern, name)), value)
            if DEPTHS.search(name):
                most = way.layers
            elif "heads" in name and not way.grouped:
                most = 4
            if way.wide:
                most = WIDE.get(name, most)
            if most < value:
                made[name] = most
    tokens = [name for name, value in settings.items() if TOKEN.search(name) and type(value) is int]
    made |= {name: number for number, name in enumerate(tokens) if settings[name] >= 128 and name in known}
    return made


def model_class(config: Any) -> Any:
    """Return the class that builds a configuration: that of ``AutoModel``, if there is one."""
    mappings = ("MODEL_MAPPING", *sorted(n for n in dir(modeling_auto) if n.endswith("_MAPPING")))
    for mapping in mappings:
        found = getattr(modeling_auto, mapping).get(type(config), None)
        if found is not None:
            return found[0] if isinstance(found, tuple | list) else found
    modeling = import_module(type(config).__module__.replace(".configuration_", ".modeling_"))
    for found in vars(modeling).values():
        kind = getattr(found, "config_class", None)
        if isinstance(found, type) and kind is type(config) and "forward" in vars(found):
            return found
    raise LookupError("no class builds it")


def built(name: str, way: Way) -> nn.Module:
    """Build a small model with random weights."""
    kind = transformers.CONFIG_MAPPING[name]
    config = kind(**small(kind, kind().to_dict(), way))
    made = model_class(config)
    with torch.device("meta"):
        if sum(p.numel() for p in made(config).parameters()) > MAX_PARAMETERS:
            raise ValueError("it stays large")
    torch.manual_seed(0)
    model: nn.Module = made(config).eval()
    return model


def generated_inputs(model: Any) -> dict[str, torch.Tensor]:
    """Return random inputs, those of a decoder's or encoder's part as well."""
    made = {}
    parameters = list(inspect.signature(model.forward).parameters)
    for name in [name for name in needed_inputs(model) if name in parameters] or parameters[:1]:
        if name in ("hidden_states", "inputs_embeds", "encoder_hidden_states"):
            made[name] = torch.randn(ROWS, LENGTH, model.config.hidden_size)
        else:
            made[name] = random_input(model, name, ROWS)
        if name.endswith("input_ids"):
            made[name] = made[name][:, :LENGTH]
    return made


def examined(name: str) -> Iterator[Row]:
    """Build, run and scan one model type; what is known before the scan comes first."""
    reasons = []
    for way in WAYS:
        try:
            model = built(name, way)
            inputs = generated_inputs(model)
            with torch.no_grad():
                model(**inputs)
        except Exception as error:
            reasons.append(f"{type(error).__name__}: {first_line(error)}")
            continue
        yield Row(name, True, reason="the scan did not end")
        try:
            report = ampaudit.scan(model, inputs, policy="torch-cuda", dtype="float16")
            yield Row(name, True, report.exit_code)
        except AuditError as error:
            yield Row(name, True, error.exit_code, str(error).splitlines()[0])
        return
    yield Row(name, reason=reasons[0])


def _child(name: str, end: Connection) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    for row in examined(name):
        end.send(row)
    end.send(None)


def in_a_process(name: str, limit: float) -> Row:
    """Examine a model type in a process of its own."""
    context = multiprocessing.get_context(
        "forkserver"
    )  # a fork of this process would share the locks of its threads
    context.set_forkserver_preload([_child.__module__, "ampaudit.audit.scan"])
    with _STARTING:
        ours, theirs = context.Pipe()
        child = context.Process(target=_child, args=(name, theirs))
        child.start()
        theirs.close()
    row, end = Row(name, reason="it did not run within the limit"), time.monotonic() + limit
    try:
        while ours.poll(max(end - time.monotonic(), 0)) and (found := ours.recv()) is not None:
            row = found
    except EOFError:
        pass
    child.kill()
    child.join()
    print(f"{row.name:32} ran: {row.ran!s:5} exit: {row.code} {row.reason}", flush=True)
    return row


def table(rows: Sequence[Row]) -> Iterator[str]:
    """Return the counts, and a row for each model type that runs and is not audited."""
    ran = [row for row in rows if row.ran]
    codes = Counter(row.code for row in ran if row.audited)
    yield f"{len(rows)} model types, {len(ran)} ran by themselves, {codes.total()} of these are audited"
    yield f"exit code 0: {codes[0]}, 1: {codes[1]}"
    yield from (f"{row.name:32} exit {row.code}: {row.reason}" for row in ran if not row.audited)


def main(arguments: Sequence[str] | None = None) -> None:
    words = parser(__doc__)
    words.add_argument("types", nargs="*", help="these model types only")
    words.add_argument("--jobs", type=int, default=2)
    words.add_argument("--limit", type=float, default=180, help="seconds for each")
    options = words.parse_args(arguments)
    names = options.types or (["bert-generation"] if options.smoke else selected())
    ampaudit.scan(nn.Linear(8, 8), torch.ones(1, 8))  # imports what the processes need
    with ThreadPoolExecutor(options.jobs) as pool:
        rows = list(pool.map(lambda name: in_a_process(name, options.limit), names))
    print("\n".join(table(rows)))
    if options.json:
        result = {
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "rows": [asdict(row) for row in rows],
        }
        options.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
