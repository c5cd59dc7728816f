"""Overrides: run kernels in place of torch's own operators, and see when and why.

See `docs/overrides.md` for the semantics.
"""

from __future__ import annotations

from tpu_kernels.registry.overrides.api import override, override_debug
from tpu_kernels.registry.overrides.handle import Decline, Override

__all__ = ["Decline", "Override", "override", "override_debug"]
