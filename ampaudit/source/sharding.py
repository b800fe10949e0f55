"""Refuses models whose parameters are spread over processes already: no process holds what is audited."""

from __future__ import annotations

from torch import nn
from torch.distributed.tensor import DTensor

from ampaudit.core.errors import SourceError
from ampaudit.core.untrusted import describe
from ampaudit.trace.fake_model import named_tensors

__all__ = ["fsdp_kind", "refuse_sharded"]

_FSDP = {  # by the names of classes, since torch.distributed.fsdp takes a second to import
    "FullyShardedDataParallel": "FullyShardedDataParallel",
    "FSDPModule": "fully_shard",
}


def fsdp_kind(module: nn.Module) -> str | None:
    """Return what has sharded a module as FSDP does; ``None`` if nothing has."""
    return next((_FSDP[base.__name__] for base in type(module).__mro__ if base.__name__ in _FSDP), None)


def refuse_sharded(model: nn.Module) -> None:
    """Raise for a model that is sharded, naming the layer or the parameter.

    Raises:
        SourceError: it is sharded by FSDP, or by tensor parallelism (DTensor).
    """
    for path, module in model.named_modules():
        kind = fsdp_kind(module)
        if kind is not None:
            raise _refused(
                f"layer {describe(path)}" if path else f"the model ({type(module).__name__})", kind
            )
    for name, tensor in named_tensors(model).items():
        if isinstance(tensor, DTensor):
            raise _refused(describe(name), "DTensor, as parallelize_module makes it")


def _refused(what: str, how: str) -> SourceError:
    return SourceError(
        f"{what} is sharded over processes already ({how})",
        hint="give the plain module, as it is before fully_shard, FSDP or parallelize_module",
    )
