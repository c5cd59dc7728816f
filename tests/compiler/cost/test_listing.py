"""Reading listings: every form of instruction that decides about control flow, memory or time."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tpu_kernels.compiler.cost.listing import Instruction, Listing, Predicate, parse
from tpu_kernels.compiler.cost.units import UNITS, matrix_use, unit_of


def one(body: str) -> Instruction:
    (instruction,) = parse(f"  0x1a PB: >> {{ {body} }}").bundles[0].scalar
    return instruction


def test_a_copy_with_predicate_thread_and_comments() -> None:
    found = one(
        "%1355 = dma.hbm_to_vmem [thread:$0]  (!%p1970_p9), /*hbm=*/%s153_s6, "
        "/*size_in_granules=*/4096, /*vmem=*/%s155_s2, /*dst_syncflagno=*/%s143_s1 /* \n"
        "base_bounds: (128, 8)\n*/"
    )
    assert found.predicate == Predicate("p1970_p9", True)
    assert found.operands == ("%s153_s6", "4096", "%s155_s2", "%s143_s1")


def test_a_store_has_its_predicate_after_the_address() -> None:
    found = one("%2530 = sst [smem:[#allocation12_spill]] (%p1_p2), %s1784_s16")
    assert found.predicate == Predicate("p1_p2", False)
    assert found.operands == ("[smem:[#allocation12_spill]]", "%s1784_s16")


def test_a_load_has_its_predicate_after_the_address() -> None:
    # Taken for unconditional, a reload of a spilled counter overwrites the counter of an inner loop
    # that shares its register: that loop never ends.
    found = one("%s5_s28 = sld [smem:[#allocation23_spill]] (%p56_p11)")
    assert found.predicate == Predicate("p56_p11", False)
    assert found.operands == ("[smem:[#allocation23_spill]]",)


def test_a_predicated_move_may_name_another_value() -> None:
    found = one("%s5_s1 = smov.u32 (%p1_p0, %s4_s1), 7")
    assert found.predicate == Predicate("p1_p0", False, "%s4_s1")
    assert found.operands == ("7",)


def test_regions_start_where_their_marker_stands() -> None:
    text = """
     0   :  { %1 = vsyncpa [#allocation4], 0 } /* Start region 1 */
   0x1   :  {} /* Start/End empty region 20 :: End region 1 :: Start region 56 */
    """
    assert parse(text).regions == {1: 0, 20: 1, 56: 1}


def test_vector_instructions_are_kept_as_opcodes_and_spills_are_told() -> None:
    text = (
        "0 : { %1 = vst [vmem:[#allocation9_spill] sm:$0xff] %v3 ;; %v4 = vld [vmem:[%s1]] ;; "
        "%v5 = vmatmul.bf16.gmra.mxu1 %v4 }"
    )
    assert parse(text).bundles[0].vector == ("vst#spill", "vld", "vmatmul.bf16.gmra.mxu1")


def test_a_call_names_the_hlo() -> None:
    found = one("%132 = inlined_call %s377_s0, %s378_s1 /* %_lambda_.1 = custom-call(%copy) */")
    assert (found.opcode, found.text) == ("inlined_call", "_lambda_.1")


@pytest.mark.parametrize("chip", ["v4", "v5e", "v5p", "v6e", "tpu7x"])
def test_whole_listings_are_understood(chip: str, listing: Callable[[str], Listing]) -> None:
    code = listing(f"matmul.{chip}")
    assert len(code.bundles) > 500
    opcodes = {opcode.removesuffix("#spill") for bundle in code.bundles for opcode in bundle.vector}
    assert {"vld", "vst", "vadd.f32"} <= opcodes
    matrix = [opcode for opcode in opcodes if unit_of(opcode) == "mxu"]
    assert matrix
    assert {matrix_use(opcode).operands for opcode in matrix} == {"bf16"}
    used = {matrix_use(opcode).mxu for opcode in matrix}
    assert len(used) in (1, 2, 4)


def test_every_unit_has_an_instruction() -> None:
    examples = {
        "mxu": "vmatmul.mubr.bf16.gmra.mrb",
        "mxu_push": "vmatpush1.bf16.msra.mxu0",
        "mxu_pop": "vpop.f32.mrb",
        "xlu": "vadd.xlane.f32.xlu0",
        "eup": "vpow2.f32",
        "valu": "vmul.f32",
        "vld": "vld",
        "vst": "vst.msk",
        "salu": "sadd.s32",
        "dma": "dma.hbm_to_vmem",
    }
    assert {unit: unit_of(opcode) for unit, opcode in examples.items()} == {
        unit: unit for unit in examples
    }
    assert set(UNITS) - set(examples) == {"spill", "fill"}  # told by the operand, not the opcode
    assert [unit_of(opcode) for opcode in ("sphi", "sbr.rel", "vsyncadd", "dma.done.wait")] == [
        None
    ] * 4
