"""Replays an exported graph under a new trace, in which each op keeps its layer, line and record."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload
from torch.utils import _pytree as pytree

from ampaudit.core.sites import SiteId
from ampaudit.policy import Decision, OpFacts
from ampaudit.trace.twins import TwinCall
from ampaudit.trace.values import CASTABLE_DTYPES, float_value, widened_tensor

META_KEY = "ampaudit"  # of a node's metadata: its OpRecord
# attribute under which a replaying module holds what it replays; not part of a layer's path
REPLAYED = "ampaudit_replayed"
# metadata of a conversion that the policy adds around the model
INSERTED = {"ampaudit_inserted": True}
# metadata key of a node whose inner graph no policy applies to, such as torch.cond
OPAQUE = "ampaudit_opaque"

# metadata key of a node whose layer is not a module: the path of the module that contains it
MODULE_SCOPE = "ampaudit_module"

_CURRENT: ContextVar[Mapping[str, Any] | None] = ContextVar("replayed", default=None)


@dataclass(frozen=True, slots=True)
class OpRecord:
    """The decision about one recorded op."""

    decision: Decision
    site: SiteId | None = None  # ``None`` for an op that the policy added
    facts: OpFacts | None = None
    inserted: bool = False  # whether the op is a cast that the policy added
    # FP32 values of the arguments that the policy changed, by position or name
    original_args: Mapping[int | str, Any] = field(default_factory=dict)
    replayed: Mapping[str, Any] | None = None  # metadata of the node of an exported program
    no_grad: bool = False  # whether the model's code switches gradients off here
    in_backward: bool = False  # whether the op is part of a custom backward
    by_values: bool = False  # whether its sizes depend on values, which the trace took from the inputs
    twin: TwinCall | None = None  # the call of a custom op whose twin calls this op


def replayed_meta() -> Mapping[str, Any] | None:
    """Return the metadata (module stack, stack trace) of the node being replayed, if any."""
    return _CURRENT.get()


def replayed_record() -> OpRecord | None:
    """Return the record of the node being replayed, if any."""
    record = (replayed_meta() or {}).get(META_KEY)
    return record if isinstance(record, OpRecord) else None


@contextmanager
def replaying(meta: Mapping[str, Any]) -> Iterator[None]:
    """While active, attribute ops to the node with that metadata."""
    token = _CURRENT.set(meta)
    try:
        yield
    finally:
        _CURRENT.reset(token)


class Replayer(fx.Interpreter):
    """Runs a module's graph, or another one on it, node by node, each node under its own metadata.

    ``converting`` replays an FP32 trace as a converter sees it: casts without an effect are left out, and an
    op with its own graph, such as ``torch.cond``, stays in float32.
    """

    def __init__(
        self, module: torch.nn.Module, graph: fx.Graph | None = None, *, converting: bool = False
    ) -> None:
        super().__init__(module, garbage_collect_values=True, graph=graph)
        self.extra_traceback = False  # do not add a dump of the graph to errors
        self._converting = converting

    def run_node(self, n: fx.Node) -> Any:
        """Run one node."""
        if self._converting and _is_idle_cast(n):
            return self.env[n.all_input_nodes[0]]
        if not self._converting or not isinstance(n.target, HigherOrderOperator):
            with replaying(_origin(n)):
                return super().run_node(n)
        args, kwargs = self.fetch_args_kwargs_from_env(n)
        with replaying(INSERTED):
            args, kwargs = pytree.tree_map_only(torch.Tensor, widened_tensor, (args, kwargs))
        with replaying(_origin(n) | {OPAQUE: True}):
            return self.call_function(n.target, args, kwargs)


def _origin(node: fx.Node) -> dict[str, Any]:
    """Return the layer, line and record of a node, which may itself replay another one."""
    record = node.meta.get(META_KEY)
    if isinstance(record, OpRecord) and record.replayed is not None:
        return {**record.replayed, META_KEY: record}
    return dict(node.meta)


def _is_idle_cast(node: fx.Node) -> bool:
    """Return whether a node converts a tensor to its own dtype."""
    if not isinstance(node.target, OpOverload) or node.target._schema.name != "aten::to":
        return False
    source: Any = node.args[0]
    before, after = float_value(source.meta.get("val")), float_value(node.meta.get("val"))
    return before is not None and after is not None and before.dtype == after.dtype in CASTABLE_DTYPES
