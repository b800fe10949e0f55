"""Abstract interpretation of a script: scalers, optimizers, models, losses, gradients, contexts."""

from __future__ import annotations
