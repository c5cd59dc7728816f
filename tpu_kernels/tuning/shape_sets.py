"""Named sets of calls: the layers of public models, packaged as a workload.

The file ``shape_sets.json`` is a workload whose origins are ``model/phase/layer``; a set is what
begins with a name, such as ``llama3-8b`` or ``llama3-8b/prefill``.
"""

from __future__ import annotations

import functools
import json
from importlib import resources

from tpu_kernels.errors import ArgumentError
from tpu_kernels.tuning.workload import Workload, WorkloadCall


def shape_set(name: str) -> Workload:
    """Return the calls of a set.

    Args:
        name: A model, or a model with phase and layer, of the origins in the file.

    Raises:
        ArgumentError: No set has that name.

    Example:
        >>> len(shape_set("llama3-8b/decode_b64"))
        5
    """
    wanted = name.strip("/") + "/"
    found = [call for call in _calls() if f"{call.origin}/".startswith(wanted)]
    if not found:
        raise ArgumentError(
            f"no set of shapes is called {name!r}", hint=f"sets: {', '.join(names())}"
        )
    return Workload(found)


def names() -> list[str]:
    """Return the names of all models in the file.

    Example:
        >>> "llama3-8b" in names()
        True
    """
    return sorted({call.origin.partition("/")[0] for call in _calls()})


@functools.cache
def _calls() -> tuple[WorkloadCall, ...]:
    text = resources.files(__package__).joinpath("shape_sets.json").read_text(encoding="utf-8")
    return tuple(WorkloadCall.from_json(entry) for entry in json.loads(text)["calls"])
