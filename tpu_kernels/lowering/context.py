"""What a rule may need besides its arguments: the source of random numbers of the program."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Iterator
from typing import Any

from tpu_kernels.lowering.rules import Unlowered


class Keys:
    """Random keys for the nodes of one program, split off one key.

    Args:
        key: What the others are made of: an array, so that no program has fixed random numbers.
    """

    def __init__(self, key: Any) -> None:
        self._key = key
        self._count = 0

    def next(self) -> Any:
        """A key that no other node has."""
        import jax

        self._count += 1
        return jax.random.fold_in(self._key, self._count)


_keys: contextvars.ContextVar[Keys | None] = contextvars.ContextVar(
    "tpu_kernels_keys", default=None
)


@contextlib.contextmanager
def drawing_from(keys: Keys | None) -> Iterator[None]:
    """Let the rules of random operators draw from these keys."""
    token = _keys.set(keys)
    try:
        yield
    finally:
        _keys.reset(token)


def random_key() -> Any:
    """A fresh key.

    Raises:
        Unlowered: The program draws no random numbers itself.
    """
    keys = _keys.get()
    if keys is None:
        raise Unlowered("it draws random numbers")
    return keys.next()
