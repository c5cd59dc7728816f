"""The tile arithmetic every kernel family needs: what a block may measure, and what fits in VMEM.

A TPU core reads VMEM in tiles of 8 sublanes x 128 lanes of 32 bits. Narrower dtypes pack more rows
into a tile (16 of bfloat16, 32 of int8), so the rows of a good block depend on the dtype and its
columns do not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

LANES = 128  # columns of a tile, whatever the dtype
MIB = 1 << 20

# What compiles on every generation without asking: the smallest default limit of a kernel is 16 MiB
# (v5e, v5p), and the compiler's own temporaries take a share of it.
DEFAULT_VMEM = 12 * MIB


def sublanes(dtype: np.dtype | type) -> int:
    """Rows of one tile of `dtype`.

    Args:
        dtype: Element type.

    Returns:
        8 for 32-bit types, 16 for 16-bit types, 32 for 8-bit types.

    Example:
        >>> sublanes(np.float32), sublanes(np.float16), sublanes(np.int8)
        (8, 16, 32)
    """
    return 8 * max(1, 4 // np.dtype(dtype).itemsize)


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `size`.

    Args:
        size: Any size, in elements.
        multiple: A positive step, in elements.

    Returns:
        The rounded size.

    Example:
        >>> round_up(200, 128)
        256
    """
    return -(-size // multiple) * multiple


def even_block(size: int, limit: int, multiple: int) -> int:
    """A block of at most `limit` for a dimension of `size` that wastes little of the last block.

    A dimension that fits is one block: a block as long as the array is legal whatever its size. A
    longer one is cut into the fewest blocks that `limit` allows, all nearly equally long: 600 rows
    become 304 + 296, not 512 + 88, for a block beyond the edge costs as much as a full one.

    Args:
        size: Length of the dimension, in elements, at least 1.
        limit: Largest block wanted, a multiple of `multiple`.
        multiple: What the hardware wants a partial block to be a multiple of.

    Returns:
        The block length, in elements.

    Example:
        >>> even_block(600, 512, 8), even_block(100, 512, 8), even_block(4096, 512, 8)
        (304, 100, 512)
    """
    if size <= limit:
        return size
    return round_up(math.ceil(size / math.ceil(size / limit)), multiple)


def padded_bytes(shape: Sequence[int], dtype: np.dtype | type) -> int:
    """VMEM taken by one buffer of `shape`, its last two dimensions padded to whole tiles.

    Args:
        shape: Block shape, at least 2-d.
        dtype: Element type.

    Returns:
        Size in bytes.

    Example:
        >>> padded_bytes((4, 100), np.float32) == 8 * 128 * 4
        True
    """
    *outer, rows, columns = shape
    tile = round_up(rows, sublanes(dtype)) * round_up(columns, LANES)
    return math.prod(outer) * tile * np.dtype(dtype).itemsize


def vmem_limit(need: int) -> int | None:
    """The `vmem_limit_bytes` to ask of the compiler for a kernel that needs `need` bytes.

    Args:
        need: Estimated bytes of buffers and scratch.

    Returns:
        None where the default limit of every generation suffices; else the need and a quarter on
        top for the compiler's temporaries and spills.

    Example:
        >>> vmem_limit(1 << 20) is None, vmem_limit(40 * MIB) == 50 * MIB
        (True, True)
    """
    return None if need <= DEFAULT_VMEM else need + need // 4
