"""Running the scalar programs of kernels whose cost is known on paper."""

from __future__ import annotations

import gzip
import itertools
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tpu_kernels.compiler import chips
from tpu_kernels.compiler.cost.calibration import calibration
from tpu_kernels.compiler.cost.listing import FormatError, Listing, parse
from tpu_kernels.compiler.cost.loops import periods_of
from tpu_kernels.compiler.cost.machine import Speed
from tpu_kernels.compiler.cost.simulate import Simulation, simulate
from tpu_kernels.compiler.cost.values import NAMESPACE, expression

Load = Callable[[str], Listing]
CYCLES = {"bf16": 16, "f32": 8, "8bit": 16}
BLOCK = 8 * 128 * 4  # bytes of a float32 tile


def run(
    listing: Listing,
    chip: str = "v6e",
    scalars: Mapping[int, np.ndarray] | None = None,
    *,
    extrapolate: bool = True,
) -> Simulation:
    facts = chips()[chip]
    return simulate(
        listing,
        calibration(facts).speed(facts),
        delay_slots=(facts.branch_delay_slots, facts.most_delay_slots),
        vmatmul_cycles=facts.cycles_per_vmatmul,
        scalars=scalars,
        extrapolate=extrapolate,
    )


# A 2048-cubed bf16 matmul in blocks of 512: 4 x 4 x 4 grid steps.
STEPS = 64
MATMUL_BYTES = STEPS * 2 * 512 * 512 * 2 + 16 * 512 * 512 * 4


@pytest.mark.parametrize(
    ("chip", "cycles"),
    [("v4", 196310), ("v5e", 209144), ("v5p", 188604), ("v6e", 130835), ("tpu7x", None)],
)
def test_a_matmul_moves_its_blocks_and_fills_its_matrix_units(
    chip: str, cycles: int | None, listing: Load
) -> None:
    found = run(listing(f"matmul.{chip}"), chip)
    facts = chips()[chip]
    products = STEPS * 512**3 // (16 * facts.mxu_size**2)  # a vmatmul multiplies 16 rows
    assert found.counts["mxu"] == products
    assert found.mxu_busy == products // facts.mxu_count * facts.cycles_per_vmatmul["bf16"]
    assert found.visits[found.hottest.first] == STEPS
    assert found.complete
    if chip != "tpu7x":  # there XLA has moved the operands to VMEM before
        assert found.hbm_bytes == MATMUL_BYTES
        assert found.copied == {"hbm->vmem": STEPS * 2**20, "vmem->hbm": 16 * 2**20}
        assert found.cycles == pytest.approx(cycles, rel=1e-3)
    if chip != "v4":  # it waits once for what it has not started, which costs nothing
        assert not found.warnings


@pytest.mark.parametrize("chip", ["v4", "v6e"])
def test_an_addition_takes_as_long_as_its_bytes(chip: str, listing: Load) -> None:
    found = run(listing(f"add.{chip}"), chip)
    facts = chips()[chip]
    assert found.hbm_bytes == 2 * 8192 * 1024 * 4
    seconds = found.cycles / facts.clock_hz
    fit = calibration(facts)
    usable = fit.hbm_bytes_per_s * fit.hbm_efficiency
    assert found.hbm_bytes / usable < seconds < 1.1 * found.hbm_bytes / usable


@pytest.mark.parametrize("steps", range(9))
def test_a_dynamic_grid_runs_as_many_steps_as_its_operand_says(steps: int, listing: Load) -> None:
    found = run(listing("dynamic_grid.v6e"), scalars={0: np.array(steps, np.int32)})
    assert not found.warnings
    assert found.copied.get("vmem->hbm", 0) == steps * BLOCK


def test_an_unknown_grid_is_a_warning_and_not_a_hang(listing: Load) -> None:
    found = run(listing("dynamic_grid.v6e"))
    assert any("depends on data" in warning for warning in found.warnings)


@settings(max_examples=30, deadline=None)
@given(indices=st.lists(st.integers(-1, 7), min_size=16, max_size=16))
def test_prefetched_indices_decide_what_is_copied_and_computed(indices: list[int]) -> None:
    path = Path(__file__).with_name("listings") / "prefetch.v6e.txt.gz"
    code = parse(gzip.decompress(path.read_bytes()).decode())
    found = run(code, scalars={0: np.array(indices, np.int32)})
    blocks = [max(index, 0) for index in indices]
    # A block that is wanted again in the next step is not copied again.
    copies = 1 + sum(a != b for a, b in itertools.pairwise(blocks))
    assert found.copied["vmem->hbm"] == 16 * BLOCK
    assert found.counts["vst"] == sum(index >= 0 for index in indices)
    assert not found.warnings
    assert found.copied["hbm->vmem"] == copies * BLOCK


# --- Loops written by hand ---

# An iteration starts one small copy and waits for that of the iteration before; where the inner
# index wraps it does the same with a large one. HBM moves one granule per cycle.
LOOP = """
   0   :  {{ %s1_s1 = smov.u32 0 ;; %s2_s2 = smov.u32 0 ;; %s3_s3 = smov.u32 0 }} /* Start region 1 */
 0x1   :  {{ %1 = dma.hbm_to_vmem [thread:$0]  0, {large}, 0, [#allocation1] }}
 0x2   :  {{ %2 = dma.hbm_to_vmem [thread:$0]  0, {small}, 0, [#allocation2] }}
 0x3 LB: > {{ %s10_s1 = sphi %s1_s1, %s20_s1 ;; %s11_s2 = sphi %s2_s2, %s21_s2 ;; %s12_s3 = sphi %s3_s3, %s22_s3 }} /* Start region 2 */
 0x4   : > {{ %s13_s4 = sadd.s32 1, %s11_s2 ;; %3 = dma.hbm_to_vmem 0, {small}, 0, [#allocation2] }}
 0x5   : > {{ %p1_p1 = scmp.ge.s32.totalorder %s13_s4, {inner} ;; %4 = dma.done.wait [#allocation2], {small} }}
 0x6   : > {{ %s21_s2 = scalar_select /*predicate=*/%p1_p1, 0, %s13_s4 ;; %s14_s5 = sadd.s32 1, %s12_s3 }}
 0x7   : > {{ %s22_s3 = scalar_select %p1_p1, %s14_s5, %s12_s3 ;; %5 = vsyncadd [#allocation2], -{small} }}
 0x8   : > {{ %7 = sbr.rel (!%p1_p1) target = $region3 }}
 0x9   : > {{ %8 = dma.hbm_to_vmem [thread:$0]  %s10_s1, /*size=*/{large}, 0, [#allocation1] }}
 0xa   : > {{ %9 = dma.done.wait [#allocation1], {large} }}
 0xb   : > {{ %10 = vsyncadd [#allocation1], -{large} ;; %v1 = vadd.f32 %v0, %v0 }}
 0xc   : > {{ %s20_s1 = sadd.s32 1, %s10_s1 }} /* Start region 3 */
 0xd   : > {{ %p2_p2 = scmp.ge.s32.totalorder %s20_s1, {outer} }}
 0xe   : > {{ %11 = sbr.rel (!%p2_p2) target = $region2 }}
 0xf   :  {{ %v2 = vmul.f32 %v1, %v1 }}
"""  # noqa: E501


def loop(inner: int, outer: int, small: int, large: int, *, extrapolate: bool) -> Simulation:
    text = LOOP.format(inner=inner, outer=outer, small=small, large=large)
    return simulate(
        parse(text),
        Speed(hbm_bytes_per_cycle=32.0, hbm_latency=50.0),
        delay_slots=0,
        vmatmul_cycles=CYCLES,
        extrapolate=extrapolate,
    )


@settings(max_examples=60, deadline=None)
@given(
    inner=st.integers(1, 40),
    outer=st.integers(1, 4000),
    small=st.integers(1, 20),
    large=st.integers(1, 600),
)
def test_skipping_through_a_loop_changes_nothing(
    inner: int, outer: int, small: int, large: int
) -> None:
    whole = loop(inner, outer, small, large, extrapolate=False)
    skipped = loop(inner, outer, small, large, extrapolate=True)
    # The queue in front of HBM may be taken as steady while it still moves by a ten-thousandth.
    assert skipped.cycles == pytest.approx(whole.cycles, rel=1e-3)
    assert skipped.counts == whole.counts
    assert skipped.visits == whole.visits
    wraps = outer // inner
    assert skipped.hbm_bytes == whole.hbm_bytes
    assert whole.hbm_bytes == 32 * (small * (outer + 1) + large * (wraps + 1))
    # 9 bundles for every iteration, 3 more where the inner index wraps, 4 around the loop.
    assert whole.bundles == 4 + 9 * outer + 3 * wraps


def test_a_long_loop_is_mostly_skipped() -> None:
    found = loop(32, 300_000, 4, 100, extrapolate=True)
    assert found.skipped > 0.99 * sum(found.visits.values())
    assert found.bundles == 4 + 9 * 300_000 + 3 * (300_000 // 32)


@pytest.mark.parametrize("items", [[], [1], [1, 2, 3, 4, 5]])
def test_what_does_not_repeat_has_no_period(items: list[int]) -> None:
    assert periods_of(items) == []


@settings(max_examples=100, deadline=None)
@given(
    start=st.lists(st.integers(0, 3), max_size=5),
    unit=st.lists(st.integers(0, 3), min_size=1, max_size=6),
    times=st.integers(3, 6),
)
def test_a_repetition_is_found_after_any_start(
    start: list[int], unit: list[int], times: int
) -> None:
    items = start + unit * times
    found = periods_of(items)
    assert any(len(unit) % period == 0 or period == len(unit) for period in found)
    for period in found:
        tail = items[-3 * period :]
        assert tail == tail[:period] * 3


def test_a_text_without_bundles_is_refused() -> None:
    with pytest.raises(FormatError, match="no bundles"):
        parse("HloModule jit_f")


# A loop of which the last slot of its branch back writes what the next iteration reads; within it a
# branch that skips a copy, with an empty bundle for its only slot.
SLOTS = """
 0x0   :  { %s1_s0 = smov.u32 0 ;; %s2_s1 = smov.u32 0 } /* End region 1 */
 0x1   : > { %p1_p0 = scmp.ne.s32.totalorder %s3_s0, %s4_s1 ;; %s3_s0 = sphi %s1_s0, %s7_s0 ;; %s4_s1 = sphi %s2_s1, %s8_s1 } /* Start region 2 */
 0x2   : > { %1 = sbr.rel (%p1_p0) target = $region3 ;; %s5_s2 = sadd.s32 1, %s3_s0 }
 0x3   :  {}
 0x4   : > { %2 = dma.hbm_to_vmem [thread:$0]  0, /*size=*/4, 0, [#allocation1] }
 0x5   : > { %p2_p1 = scmp.ge.s32.totalorder %s5_s2, 5 ;; %s8_s1 = sadd.s32 2, %s4_s1 } /* Start region 3 */
 0x6   : > { %3 = sbr.rel (!%p2_p1) target = $region2 }
 0x7   :  {}
 0x8   : > { %s7_s0 = smov.u32 %s5_s2 } /* End region 2 */
 0x9   :  { %v2 = vmul.f32 %v1, %v1 }
"""  # noqa: E501


def test_slots_after_a_branch_are_those_of_its_region() -> None:
    speed = Speed(hbm_bytes_per_cycle=32.0, hbm_latency=50.0)
    found = simulate(parse(SLOTS), speed, delay_slots=(1, 6), vmatmul_cycles=CYCLES)
    # The counter in s0 is 0 to 4, that in s1 twice as much: they are equal once, and the copy runs.
    assert found.copied == {"hbm->vmem": 4 * 32}
    assert (found.complete, found.warnings) == (True, {})
    assert found.bundles == 1 + 5 * 8 - 4 + 1
    # Taken for one fixed slot, the counter would never be written.
    fixed = simulate(parse(SLOTS), speed, delay_slots=1, vmatmul_cycles=CYCLES, limit_s=0.5)
    assert not fixed.complete


def test_the_high_half_of_a_product_is_known() -> None:
    value = expression("smulhi.u32", ["E[0]", "E[1]"])
    assert value is not None
    for number in (0, 1, 2, 7, 3 * 10**9):
        # How a number modulo three is computed: times two thirds of 2^32 and a bit, shifted.
        product = eval(value, {**NAMESPACE, "E": [2863311531, number]})
        assert product >> 1 & 0x7FFFFFFF == number // 3
    assert expression("smulhi.s32", ["1", "1"]) is None
