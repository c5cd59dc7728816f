"""Every entry of the catalogue, provoked through the real compiler."""

from __future__ import annotations

from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from tpu_kernels.compiler import compile_function, resolve
from tpu_kernels.compiler.diagnose import catalogue, diagnose, legal_block

F32, BF16, F16, INT32, INT8 = jnp.float32, jnp.bfloat16, jnp.float16, jnp.int32, jnp.int8
MIB = 1 << 20


@dataclass
class Mistake:
    """A kernel that the catalogue's entry `entry` is about.

    `words` must appear in the report's text; `line` is the author's line at fault, or a part of it.
    """

    entry: str
    kernel: str
    avals: list[tuple[tuple[int, ...], Any]]
    status: str
    words: list[str]
    line: str | None = None
    target: str = "v6e"
    arguments: dict[str, Any] = field(default_factory=dict)


SQUARE_F32 = [((128, 128), F32)] * 2
TILE = [((8, 128), F32)]
BIG = [((4096, 8192), F32)]

MISTAKES = [
    Mistake(
        "scoped-vmem",
        "rows",
        BIG,
        "vmem",
        ["64.00MiB", "32.00MiB", "vmem_limit_bytes"],
        line="return pl.pallas_call(",
        arguments={"rows": 512},
    ),
    Mistake(
        "vmem-capacity",
        "rows",
        BIG,
        "vmem",
        ["input 0: block f32[1024,8192], 2 buffers, 64.00MiB", "output 0"],
        arguments={"rows": 1024, "limit": 120 * MIB},
    ),
    Mistake("vmem-allocation", "rows", BIG, "vmem", ["VMEM"], target="v4", arguments={"rows": 512}),
    Mistake(
        "smem-allocation",
        "large_prefetch",
        [((1 << 20,), INT32), ((8, 128), INT32)],
        "error",
        ["4.0 MiB", "1.0 MiB", "SMEM"],
    ),
    Mistake("hbm", "gram", [((400_000, 1024), BF16)], "error", ["out of HBM", "GiB"]),
    Mistake(
        "float16",
        "increment",
        [((8, 128), F16)],
        "unsupported",
        ["float16", "bfloat16"],
        line="o[...] = a[...] + jnp.asarray(1, a.dtype)",
    ),
    Mistake(
        "matmul-dtype",
        "matmul",
        [((128, 128), INT8)] * 2,
        "unsupported",
        ["int8", "v4"],
        line="# matmul",
        target="v4",
        arguments={"acc": INT32},
    ),
    Mistake(
        "matmul-operands",
        "matmul",
        [((128, 128), jnp.float4_e2m1fn)] * 2,
        "unsupported",
        ["float4_e2m1fn", "v6e"],
        line="# matmul",
    ),
    Mistake(
        "precision",
        "matmul",
        SQUARE_F32,
        "unsupported",
        ["Precision.HIGH", "HIGHEST"],
        line="# matmul",
        arguments={"precision": jax.lax.Precision.HIGH},
    ),
    Mistake(
        "block-tile",
        "blocked",
        [((64, 256), F32)],
        "invalid",
        ["(4, 64)", "(64, 256)", "input 0", "(8, 128)"],
        arguments={"block": (4, 64)},
    ),
    Mistake(
        "block-rank-1",
        "blocked",
        [((1000,), F32)],
        "invalid",
        ["(100,)", "128"],
        arguments={"block": (100,)},
    ),
    Mistake("block-rank-0", "rank_0", [((), F32)], "invalid", ["input 0", "SMEM"]),
    Mistake("scalar-store", "scalar_store", TILE, "invalid", ["scalar"], line="o[0, 0] ="),
    Mistake(
        "store-shape", "store_shape", TILE, "invalid", ["(128, 8)", "(8, 128)"], "# store_shape"
    ),
    Mistake("store-dtype", "store_dtype", TILE, "invalid", ["int32"], line="# store_dtype"),
    Mistake(
        "alignment",
        "unaligned_slice",
        [((64, 256), F32)],
        "invalid",
        ["multiple of 128", "pl.multiple_of"],
        line="# unaligned_slice",
    ),
    Mistake("captured-constant", "captured_constant", TILE, "invalid", ["f32[128]", "inputs"]),
    Mistake("primitive", "sort", TILE, "unsupported", ["'sort'"], line="# sort"),
    Mistake("gather", "gather", [((16, 128), F32)], "unsupported", ["indexing"], line="# gather"),
    Mistake("narrow-integer", "floor_divide", [((32, 128), INT8)], "unsupported", ["int8"]),
    Mistake(
        "element-type",
        "double",
        [((8, 128), jnp.complex64)],
        "unsupported",
        ["complex"],
        line="# double",
    ),
    Mistake("debug-print", "debug_print", TILE, "unsupported", ["print"], line="# debug_print"),
    Mistake("scan-outputs", "scan_outputs", TILE, "unsupported", ["scan"], line="# scan_outputs"),
    Mistake("strided-slice", "strided", [((16, 128), BF16)], "unsupported", ["step"], "# strided"),
    Mistake("empty-vector", "prefix_sum", TILE, "unsupported", ["empty"], line="# prefix_sum"),
    Mistake(
        "no-instruction",
        "twice",
        [((32, 128), jnp.float8_e4m3fn)],
        "unsupported",
        ["float8_e4m3fn", "v6e"],
    ),
    Mistake(
        *("iteration-bounds", "grid_of", TILE, "invalid", ["negative"]), arguments={"grid": (-1,)}
    ),
    Mistake(
        *("grid-type", "grid_of", TILE, "invalid", ["(1.5,)", "dynamic grid"]),
        arguments={"grid": (1.5,)},
    ),
    Mistake(
        *("semantics-length", "grid_of", TILE, "invalid", ["2 entries", "1 axes"]),
        arguments={"grid": (1,), "semantics": ("parallel", "arbitrary")},
    ),
    Mistake(
        *("semantics-name", "grid_of", TILE, "invalid", ["'magic'", '"arbitrary"']),
        arguments={"grid": (1,), "semantics": ("magic",)},
    ),
    Mistake("index-map-results", "one_result", TILE, "invalid", ["1 values"], "# one_result"),
    Mistake("index-map-type", "float_result", TILE, "invalid", ["integers"], "# float_result"),
    Mistake(
        *("block-rank", "mapped", TILE, "invalid", ["(8,)", "(8, 128)", "input 0"]),
        arguments={"index_map": lambda i: (i,), "block": (8,)},
    ),
    Mistake(
        *("load-any", "in_space", TILE, "invalid", ["HBM", "sync_copy"], "# in_space"),
        arguments={"space": pl.ANY},
    ),
    Mistake(
        *("smem-vector", "in_space", TILE, "invalid", ["scalar memory"], "# in_space"),
        arguments={"space": pltpu.SMEM},
    ),
    Mistake("program-id", "program_id", TILE, "invalid", ["pl.program_id(0)"], "# program_id"),
    Mistake("dma-alignment", "unaligned_copy", TILE, "invalid", ["256 bits"], "# unaligned_copy"),
    Mistake("shape-cast", "reshaped", [((3, 100), F32)], "unsupported", ["v6e"], "# reshaped"),
    Mistake(
        *("float32-only", "reduced", [((8, 128), INT32)], "unsupported", ["argmax"], "# reduced"),
        arguments={"operation": jnp.argmax},
    ),
    Mistake(
        *("reduction-dtype", "reduced", [((8, 128), jnp.uint32)], "unsupported", ["unsigned"]),
        line="# reduced",
        arguments={"operation": jnp.max},
    ),
    Mistake(
        *("reduction-element", "reduced", [((512, 128), jnp.float4_e2m1fn)], "unsupported"),
        ["float32"],
        line="# reduced",
        arguments={"operation": jnp.sum},
    ),
    Mistake(
        *("matmul-accumulator", "gram_plain", [((16, 128), BF16)], "invalid", ["32-bit"]),
        line="# gram_plain",
    ),
    Mistake(
        *("matmul-unsigned", "gram_plain", [((8, 128), jnp.uint32)], "unsupported", ["uint32"]),
        line="# gram_plain",
    ),
    Mistake(
        *("matmul-integer", "matmul", [((128, 128), jnp.int16)] * 2, "unsupported", ["16-bit"]),
        line="# matmul",
        target="tpu7x",
        arguments={"acc": INT32},
    ),
    Mistake("python-branch", "python_branch", TILE, "invalid", ["pl.when"], "# python_branch"),
    Mistake("concrete-value", "python_number", TILE, "invalid", ["astype"], "# python_number"),
    Mistake(
        *("code-generator", "floor_divide", [((8, 512), jnp.uint8)], "unsupported", ["int32"]),
        target="v5e",
    ),
    Mistake("not-implemented", "contract_two", [((4, 8, 128), F32)], "unsupported", ["lhs"]),
]


@pytest.mark.libtpu
@pytest.mark.usefixtures("warm_workers")
@pytest.mark.parametrize("mistake", MISTAKES, ids=lambda mistake: mistake.entry)
def test_a_well_known_mistake_is_explained(mistake: Mistake, kernels: ModuleType) -> None:
    fn = getattr(kernels, mistake.kernel)
    avals = [jax.ShapeDtypeStruct(shape, dtype) for shape, dtype in mistake.avals]
    report = compile_function(
        lambda *arrays: fn(*arrays, **mistake.arguments), avals, mistake.target, name="tpu::k"
    )
    assert report.status == mistake.status, report
    assert report.compiler_text is not None
    found = diagnose(report.compiler_text, resolve(mistake.target))
    assert found.name == mistake.entry
    for word in mistake.words:
        assert word in report.text
    if mistake.entry != "hbm":  # the whole program is at fault there
        assert report.where is not None
        assert "kernels.py:" in report.where
    if mistake.line is not None:
        assert mistake.line in (report.source_line or "")


def test_every_entry_has_a_mistake_that_provokes_it() -> None:
    # The last resorts, for messages of a known form and unknown content, are tested below.
    special = {"verification", "mosaic"}
    assert {mistake.entry for mistake in MISTAKES} == {
        entry.name for entry in catalogue()
    } - special


@pytest.mark.parametrize(
    ("message", "status", "words"),
    [
        (
            "INTERNAL: Mosaic failed to compile TPU kernel with MLIR module name `m` HLO name "
            "`f.1`: E2009: CompileTimeOdd: the moon is full\nSee https://...",
            "error",
            "the moon is full",
        ),
        (
            "Pallas encountered an internal verification error. Please file a bug at x. Error "
            "details: 'tpu.x' op is odd\nmore",
            "error",
            "'tpu.x' op is odd",
        ),
        ("something never seen\nsecond line", "error", "Oops: something never seen"),
    ],
)
def test_an_unknown_message_keeps_its_own_words(message: str, status: str, words: str) -> None:
    found = diagnose(message, resolve("v6e"), error_type="Oops")
    assert found.status == status
    assert words in found.error
    assert "second line" not in found.error


@pytest.mark.parametrize(
    ("block", "array", "legal"),
    [
        ((4, 64), (64, 256), (8, 128)),
        ((1, 128), (64, 256), (8, 128)),
        ((13, 200), (13, 200), (13, 200)),
        ((5, 200), (13, 200), (8, 200)),
        ((2, 5, 100), (4, 64, 300), (2, 8, 128)),
    ],
)
def test_the_nearest_legal_block(
    block: tuple[int, ...], array: tuple[int, ...], legal: tuple[int, ...]
) -> None:
    assert legal_block(block, array) == legal


@pytest.mark.libtpu
@pytest.mark.usefixtures("warm_workers")
def test_a_suggested_block_is_accepted_by_the_compiler(kernels: ModuleType) -> None:
    x = jax.ShapeDtypeStruct((64, 256), F32)
    block = legal_block((4, 64), x.shape)
    report = compile_function(lambda a: kernels.blocked(a, block), [x], "v6e", name="blocked")
    assert report.ok, report
