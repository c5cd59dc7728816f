"""Overrides: run kernels in place of torch's own operators, and see when and why.

See `docs/overrides.md` for the semantics.
"""

from __future__ import annotations

from tpu_kernels.registry.overrides.api import override, override_debug
from tpu_kernels.registry.overrides.graph import decomposition_table
from tpu_kernels.registry.overrides.handle import Decline, Override
from tpu_kernels.registry.overrides.report import (
    CallSite,
    Explanation,
    OverrideRecord,
    explain_overrides,
    overrides,
)

__all__ = [
    "CallSite",
    "Decline",
    "Explanation",
    "Override",
    "OverrideRecord",
    "decomposition_table",
    "explain_overrides",
    "override",
    "override_debug",
    "overrides",
]
