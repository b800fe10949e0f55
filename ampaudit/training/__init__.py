"""Training in 16 bits: converted modules, loss scalers, and what watches them; all on torch's own parts."""

from __future__ import annotations

__all__: list[str] = []
