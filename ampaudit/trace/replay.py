"""Which node of an already exported graph is being replayed, so that a new trace can keep its origin."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

__all__ = ["INSERTED", "OPAQUE", "REPLAYED", "replayed_meta", "replaying"]

# attribute under which a replaying module keeps the graph; no part of a layer's path
REPLAYED = "ampaudit_replayed"

# metadata of a conversion that the policy adds around the model
INSERTED = {"ampaudit_inserted": True}
# key in the metadata of a node whose insides no policy looks into, such as torch.cond
OPAQUE = "ampaudit_opaque"

_CURRENT: ContextVar[Mapping[str, Any] | None] = ContextVar("replayed", default=None)


def replayed_meta() -> Mapping[str, Any] | None:
    """The metadata (module stack, stack trace) of the node being replayed, if one is."""
    return _CURRENT.get()


@contextmanager
def replaying(meta: Mapping[str, Any]) -> Iterator[None]:
    """While active, ops come from the node with that metadata."""
    token = _CURRENT.set(meta)
    try:
        yield
    finally:
        _CURRENT.reset(token)
