"""Every private name of torch that the package uses, one small function each, with the reason.

Nothing else in the package may reach into torch's private names, so that an upgrade of torch means
reading this file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch
from torch._ops import OpOverload

# ---------------------------------------------------------------------------------------------
# Simulated "tpu" device (backends/device). torch offers a Python backend for PrivateUse1 only
# through private names; the device is plain Python because of them.

# The DLPack capsule without the public functions' checks: those refuse tensors that require a
# gradient, and compare device names with "privateuseone" literally, which a renamed backend fails.
to_dlpack: Callable[[torch.Tensor], Any] = torch._C._to_dlpack
from_dlpack: Callable[[Any], torch.Tensor] = torch._C._from_dlpack


def privateuse1_name() -> str:
    """Return the name that the PrivateUse1 dispatch key goes by (``privateuseone`` if unclaimed)."""
    return str(torch._C._get_privateuse1_backend_name())


def claim_privateuse1(name: str, module: object) -> None:
    """Rename PrivateUse1, and give it Python-written hooks, device guard and ``torch.<name>``.

    There is no public function for a backend without C++ code; this is the one that torch tests.
    """
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend

    _setup_privateuseone_for_python_backend(name, backend_module=module)


def redispatcher(operator: OpOverload) -> Callable[..., Any]:
    """Return ``fn(keyset, *args, **kwargs)`` that runs one operator's kernel for a key set.

    `OpOverload.redispatch` does the same with a Python frame more (0.3 µs of 1.5).
    """
    return operator._handle.redispatch_boxed  # type: ignore[no-any-return]


def key_set(key: str) -> Any:
    """Return the dispatch key set that holds one key, by its name such as ``"CPU"``."""
    return torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, key))


def registered_operators(key: str) -> frozenset[str]:
    """Return the names (``aten::add.Tensor``) of all operators with a kernel for a dispatch key."""
    return frozenset(torch._C._dispatch_get_registrations_for_dispatch_key(key))


def exclude_keys(keys: Any) -> AbstractContextManager[None]:
    """Return a context in which the dispatcher skips the given keys, as C++ autocast kernels do."""
    return torch._C._ExcludeDispatchKeyGuard(keys)  # type: ignore[no-any-return]


def negative_view(tensor: torch.Tensor) -> torch.Tensor:
    """Return a view with the lazy negation bit flipped; only ``imag`` of a conjugate shows it."""
    return torch._neg_view(tensor)


def privateuse1_device_type() -> int:
    """Return ``c10::DeviceType::PrivateUse1`` as the number that C++ stores."""
    return int(torch._C._autograd.DeviceType.PrivateUse1)  # type: ignore[attr-defined]


def replace_accelerator_functions(functions: Mapping[str, Callable[..., Any]]) -> None:
    """Replace C functions behind ``torch.accelerator`` that a Python backend cannot provide.

    Args:
        functions: By the name after ``torch._C._accelerator_``, such as ``synchronizeDevice``.
    """
    for name, function in functions.items():
        setattr(torch._C, f"_accelerator_{name}", function)


def library_folder() -> Path:
    """Return the folder of torch's shared libraries (``libc10.so``, ``libtorch_cpu.so``)."""
    return Path(torch.__file__).parent / "lib"
