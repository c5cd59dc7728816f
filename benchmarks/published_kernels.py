"""The kernels whose times on real TPUs are published, built from the rows that describe them."""

from __future__ import annotations

import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu


@dataclass(frozen=True)
class Built:
    """A function with its arguments, ready to be compiled."""

    fn: Callable[..., Any]
    avals: Sequence[jax.ShapeDtypeStruct]
    concrete: Mapping[int, np.ndarray] = field(default_factory=dict)


def build(row: Mapping[str, Any]) -> Built | None:
    """Build the kernel of a row; None if that is not possible here."""
    builder = _BUILDERS.get(row["kind"])
    return builder(row) if builder is not None else None


def _docs_matmul(row: Mapping[str, Any]) -> Built | None:
    """The matmul of the JAX documentation: bf16 in and out, f32 accumulator, blocks (m, k, n)."""
    match = re.match(r"\[(\d+), (\d+), (\d+)\](True|False)(True|False)", row["spec"])
    if match is None:
        return None
    m, k, n = (int(size) for size in match.groups()[:3])
    transpose, relu = (flag == "True" for flag in match.groups()[3:])
    bm, bk, bn = row["config"]
    contract = ((1,), (1 if transpose else 0,))

    def body(x: Any, y: Any, z: Any, accumulator: Any) -> None:
        @pl.when(pl.program_id(2) == 0)
        def _() -> None:
            accumulator[...] = jnp.zeros_like(accumulator)

        accumulator[...] += jax.lax.dot_general(
            x[...], y[...], (contract, ((), ())), preferred_element_type=jnp.float32
        )

        @pl.when(pl.program_id(2) == k // bk - 1)
        def _() -> None:
            total = accumulator[...]
            z[...] = (jnp.maximum(total, 0) if relu else total).astype(z.dtype)

    if transpose:
        y_spec, y_shape = pl.BlockSpec((bn, bk), lambda i, j, step: (j, step)), (n, k)
    else:
        y_spec, y_shape = pl.BlockSpec((bk, bn), lambda i, j, step: (step, j)), (k, n)

    def matmul(x: jax.Array, y: jax.Array) -> jax.Array:
        return pl.pallas_call(
            body,
            grid=(m // bm, n // bn, k // bk),
            in_specs=[pl.BlockSpec((bm, bk), lambda i, j, step: (i, step)), y_spec],
            out_specs=pl.BlockSpec((bm, bn), lambda i, j, step: (i, j)),
            scratch_shapes=[pltpu.VMEM((bm, bn), jnp.float32)],
            out_shape=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
            compiler_params=pltpu.CompilerParams(
                dimension_semantics=("parallel", "parallel", "arbitrary")
            ),
            name="docs_matmul",
        )(x, y)

    avals = [
        jax.ShapeDtypeStruct((m, k), jnp.bfloat16),
        jax.ShapeDtypeStruct(y_shape, jnp.bfloat16),
    ]
    return Built(matmul, avals)


# --- tokamax ---------------------------------------------------------------------------------

_DTYPES = {"bf16": "bfloat16", "f32": "float32", "i32": "int32", "s32": "int32", "i8": "int8"}


def _array(text: str) -> jax.ShapeDtypeStruct:
    """``"bf16[8,128]"``"""
    name, _, sizes = text.removesuffix("]").partition("[")
    return jax.ShapeDtypeStruct(
        tuple(int(size) for size in sizes.split(",") if size), _DTYPES.get(name, name)
    )


def _entry(spec: str, name: str) -> Any:
    """A value in a row's spec, which may be cut off at its end."""
    found = re.search(rf'"{name}":', spec)
    if found is None:
        return None
    try:
        return json.JSONDecoder().raw_decode(spec[found.end() :])[0]
    except ValueError:
        return None


def _config(row: Mapping[str, Any]) -> dict[str, Any]:
    config = row["config"]
    config = dict(json.loads(config) if isinstance(config, str) else config)
    if str(row.get("id", "")).endswith("_sw") and {"tile_k", "tile_n"} <= config.keys():
        # Measured before the two changed their meaning for products with the transposed operand.
        config["tile_k"], config["tile_n"] = config["tile_n"], config["tile_k"]
    return config


def _tokamax_attention(row: Mapping[str, Any]) -> Built | None:
    if importlib.util.find_spec("tokamax") is None:
        return None
    spec = row["spec"]
    residuals = _entry(spec, "return_residuals")
    if residuals is None:
        return None  # cut off in the row, and it decides how much the kernel writes
    from tokamax._src.ops.attention import base, pallas_mosaic_tpu

    config = _config(row)
    layout = pallas_mosaic_tpu.splash.QKVLayout
    config.update({name: layout(config[name]) for name in config if name.endswith("_layout")})
    q, k, v = (_array(_entry(spec, name)) for name in "qkv")
    mask = _entry(spec, "mask") or {}
    cap = _entry(spec, "logits_soft_cap")
    op = pallas_mosaic_tpu.PallasMosaicTpuFlashAttention(
        config=pallas_mosaic_tpu.Config(**config), bypass_device_check=True
    )

    def attention(q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
        return op(
            q,
            k,
            v,
            mask=base.Mask(is_causal=bool(mask.get("is_causal"))),
            logits_scale=_entry(spec, "logits_scale"),
            logits_soft_cap=cap,
            return_residuals=residuals,
        )

    return Built(attention, [q, k, v])


def _tokamax_ragged_dot(row: Mapping[str, Any]) -> Built | None:
    if importlib.util.find_spec("tokamax") is None:
        return None
    from tokamax._src.ops.ragged_dot import pallas_mosaic_tpu

    spec = row["spec"]
    lhs, rhs = _array(_entry(spec, "lhs")), _array(_entry(spec, "rhs"))
    sizes = _entry(spec, "group_sizes")
    numbers = _entry(spec, "ragged_dot_dimension_numbers")
    if not isinstance(sizes, dict) or numbers is None or "explicit groups" in row.get("src", ""):
        return None  # sizes that the row has cut off, or does not have at all
    count, total = sizes["num_groups"], sizes["total_size"]
    # What tokamax tunes with where a specification names only the total: rows drawn at random, so
    # that hardly any group ends with a tile.
    drawn = np.random.default_rng(0).choice(count, (total,), replace=True)
    groups = np.bincount(drawn, minlength=count).astype(np.int32)
    contract, batch = numbers["dot_dimension_numbers"]
    dimensions = jax.lax.RaggedDotDimensionNumbers(
        dot_dimension_numbers=(tuple(map(tuple, contract)), tuple(map(tuple, batch))),
        lhs_ragged_dimensions=numbers["lhs_ragged_dimensions"],
        rhs_group_dimensions=numbers["rhs_group_dimensions"],
    )
    op = pallas_mosaic_tpu.PallasMosaicTpuRaggedDot(
        config=pallas_mosaic_tpu.Config(**_config(row)), bypass_device_check=True
    )

    # The residual is the result once more: XLA copies it, which takes up to a quarter of the time.
    residuals = bool(_entry(spec, "return_residuals"))

    def ragged_dot(lhs: jax.Array, rhs: jax.Array, group_sizes: jax.Array) -> jax.Array:
        return op(
            lhs,
            rhs,
            group_sizes=group_sizes,
            ragged_dot_dimension_numbers=dimensions,
            return_residuals=residuals,
        )

    return Built(ragged_dot, [lhs, rhs, jax.ShapeDtypeStruct((count,), "int32")], {2: groups})


_BUILDERS: Mapping[str, Callable[[Mapping[str, Any]], Built | None]] = {
    "docs_matmul": _docs_matmul,
    "tok_attn": _tokamax_attention,
    "tok_rdot": _tokamax_ragged_dot,
}
