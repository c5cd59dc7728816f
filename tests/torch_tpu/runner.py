"""Runs the checks of a program in a process of TorchTPU, and writes what became of each.

``python -m tpu_kernels run --torch-tpu -q -m tests.torch_tpu.runner MODULE RESULTS.json``
"""

from __future__ import annotations

import importlib
import json
import sys
import traceback
import warnings
from pathlib import Path

import pytest

OK = "ok"


def main(module: str, results: str) -> None:
    """Call every ``check_*`` function of a module; the file is written after each."""
    warnings.simplefilter("error")
    # Most of torch.tpu warns of being experimental; torch of its own use of pytree, and once of
    # the first kernel that replaces another.
    warnings.filterwarnings("ignore", message="<TorchTpu/")
    warnings.filterwarnings("ignore", category=FutureWarning, module="torch")
    warnings.filterwarnings("ignore", category=DeprecationWarning)
    program = importlib.import_module(module)
    outcomes: dict[str, str] = {}
    for name, check in list(vars(program).items()):
        if not name.startswith("check_"):
            continue
        try:
            check()
            outcomes[name] = OK
        except (Exception, pytest.fail.Exception):
            outcomes[name] = traceback.format_exc()
        Path(results).write_text(json.dumps(outcomes))


if __name__ == "__main__":
    main(*sys.argv[1:])
