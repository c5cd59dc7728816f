"""From a listing to Python code: one function for each basic block.

Interpreting bundles one by one would take minutes for a kernel of some ten thousand grid steps. A
translated block runs in some microseconds: it evaluates the block's scalar instructions on a list
of registers, tells the machine about copies and semaphores, advances the clock, and returns the
number of the block to run next.

Bundles have VLIW semantics: all operands are read before any destination is written. Registers are
SSA names, and a ``sphi`` reads the physical register that its predecessors wrote, so those are kept
as well.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from tpu_kernels.compiler.cost.listing import Instruction, Listing, Predicate
from tpu_kernels.compiler.cost.units import matrix_use, unit_of
from tpu_kernels.compiler.cost.values import expression

_PHYSICAL = re.compile(r"[sp]?\d+_([sp]\d+)$")
_ALLOCATION = re.compile(r"#allocation(\d+)(?:_spill)?$")
_NUMBER = re.compile(r"-?(?:0x[0-9a-f]+|\d+)$")
_TARGET = re.compile(r"target = \$region(\d+)")
_SHAPE = re.compile(r"shape: ([a-z0-9]+\[[0-9,]*\])")
_STORE = re.compile(r"(\[smem:\[[^\]]*\]\]|\[smem:[^\]]*\])\s*,?\s*(.*)$", re.DOTALL)
_LOAD = re.compile(r"(\[smem:\[[^\]]*\]\]|\[smem:[^\]]*\])")
_MEMORY_OPERANDS = ("hbm", "vmem", "smem", "cmem", "vmem_shared")
_WITHOUT_EFFECT = (
    *("shalt", "sfence", "strace", "spush", "sdma", "snop", "vsyncpa", "vsyncmov", "vsyncset"),
    *("dma.smem_to_host_iova",),
)
_ALLOCATION_BITS = 20  # addresses of different allocations must not meet
OPERAND_BITS = 16  # nor those of different operands in HBM

Reference = int | str
"""An operand of a comparison: a constant, or ``"E[i]"``."""


@dataclass
class Block:
    """A basic block.

    Attributes:
        first: Its first bundle, which is its name.
        end: One past its last bundle.
        cycles: What it takes without waiting: its bundles, or longer if an MXU is busy longer.
        mxu_busy: Cycles that the busiest MXU needs.
        counts: Instructions by unit.
        source: Python code of its function.
    """

    first: int
    end: int
    cycles: int = 0
    mxu_busy: int = 0
    counts: Counter[str] = field(default_factory=Counter)
    source: str = ""

    @property
    def mxu_excess(self) -> int:
        """Cycles by which the busiest MXU exceeds the bundles."""
        return self.cycles - self.bundles

    @property
    def bundles(self) -> int:
        """Number of its bundles."""
        return self.end - self.first


@dataclass
class Translation:
    """A listing as Python code.

    Attributes:
        blocks: Blocks by first bundle.
        registers: Number of registers.
        comparisons: Two operands that the code compares and the register of the outcome; a loop
            repeats itself until an outcome changes.
        loads: Addresses of loads from scalar memory.
        operands: Memory and shape of each operand by (index, whether it is an output).
        warnings: What could not be translated, counted.
    """

    blocks: dict[int, Block]
    registers: int
    comparisons: list[tuple[Reference, Reference, str]]
    loads: list[str]
    operands: dict[tuple[int, bool], tuple[str, str]]
    warnings: Counter[str]


def translate(
    listing: Listing, delay_slots: int | tuple[int, int], vmatmul_cycles: Mapping[str, int]
) -> Translation:
    """Translate a listing.

    Args:
        listing: The code of one HLO.
        delay_slots: Bundles after a branch that are still executed; a pair where it depends on
            the branch's region, the least and the most.
        vmatmul_cycles: Cycles that one matrix instruction keeps its MXU busy, by class of operands.

    Returns:
        The translation.
    """
    slots = (delay_slots, delay_slots) if isinstance(delay_slots, int) else delay_slots
    return _Translator(listing, slots, vmatmul_cycles).run()


class _Translator:
    def __init__(
        self, listing: Listing, delay_slots: tuple[int, int], vmatmul_cycles: Mapping[str, int]
    ) -> None:
        self.listing = listing
        self.delay_slots = delay_slots
        self.vmatmul_cycles = vmatmul_cycles
        self.index: dict[str, int] = {}
        self.comparisons: list[tuple[Reference, Reference, str]] = []
        self.loads: list[str] = []
        self.operands: dict[tuple[int, bool], tuple[str, str]] = {}
        self.warnings: Counter[str] = Counter()
        self.branches = self._find_branches()
        starts = frozenset(listing.regions.values())
        self.slots = {position: self._slots(position, starts) for position in self.branches}
        self.ending = {position + slots: position for position, slots in self.slots.items()}
        self.phi_registers = {
            register
            for bundle in listing.bundles
            for instruction in bundle.scalar
            if instruction.opcode == "sphi"
            and (register := _physical(instruction.destination)) is not None
        }

    def run(self) -> Translation:
        cuts = {0}
        total = len(self.listing.bundles)
        for position, (_, target) in self.branches.items():
            cuts |= {max(target, 0), min(position + self.slots[position] + 1, total)}
        firsts = sorted(cut for cut in cuts if cut < total)
        blocks = {}
        for first, end in zip(firsts, [*firsts[1:], total], strict=True):
            blocks[first] = self._block(first, end, end if end < total else -1)
        return Translation(
            blocks, len(self.index), self.comparisons, self.loads, self.operands, self.warnings
        )

    def _find_branches(self) -> dict[int, tuple[Predicate | None, int]]:
        branches = {}
        for position, bundle in enumerate(self.listing.bundles):
            for instruction in bundle.scalar:
                if not instruction.opcode.startswith("sbr"):
                    continue
                named = _TARGET.search(instruction.text)
                # The way of a second core, which is not simulated, may lead out of the listing.
                target = self.listing.regions.get(int(named[1]), -1) if named else -1
                branches[position] = (instruction.predicate, target)
        return branches

    # --- One block ---

    def _block(self, first: int, end: int, following: int) -> Block:
        block = Block(first, end)
        lines = [f"def B{first}(E,S):", " t=S.t"]
        busy: Counter[str] = Counter()
        for position in range(first, end):
            bundle = self.listing.bundles[position]
            for opcode in bundle.vector:
                plain = opcode.removesuffix("#spill")
                unit = unit_of(plain)
                if unit is not None:
                    block.counts[unit] += 1
                if unit == "mxu":
                    use = matrix_use(plain)
                    busy[use.mxu] += self.vmatmul_cycles[use.operands]
                if plain != opcode:
                    block.counts["spill" if plain.startswith("vst") else "fill"] += 1
            for instruction in bundle.scalar:
                unit = unit_of(instruction.opcode)
                if unit is not None:
                    block.counts[unit] += 1
            self._bundle(lines, bundle.scalar, position - first)
            if position in self.branches:
                lines.append(self._branch(position))
        block.mxu_busy = max(busy.values(), default=0)
        block.cycles = max(block.bundles, block.mxu_busy)
        lines.append(f" S.t=t+{block.cycles}")
        branch = self.ending.get(end - 1)  # the one that takes effect where the block ends
        if branch is not None:
            taken = self._register(f"B:{branch}")
            lines += [f" if {taken}==1:", f"  {taken}=0", f"  return {self.branches[branch][1]}"]
        lines.append(f" return {following}")
        block.source = "\n".join(lines)
        return block

    def _slots(self, position: int, starts: frozenset[int]) -> int:
        """How many bundles after a branch are executed before it takes effect.

        Where that is not fixed, the branch's region ends with them; a branch forwards that has no
        region of its own has an empty bundle for its last slot.
        """
        least, most = self.delay_slots
        forwards = self.branches[position][1] > position
        bundles = self.listing.bundles
        for last in range(position + least, min(position + most, len(bundles) - 1)):
            empty = not bundles[last].scalar and not bundles[last].vector
            if last + 1 in starts or last in self.listing.ends or (forwards and empty):
                return last - position
        return most

    def _branch(self, position: int) -> str:
        """Decide on a branch; it takes effect after its slots, which it remembers till then."""
        predicate, target = self.branches[position]
        taken = "1"
        if predicate is not None:
            condition = self._condition(predicate)
            taken = f"S.branch({position},{condition},{0 <= target <= position})"
        return f" {self._register(f'B:{position}')}={taken}"

    def _bundle(self, lines: list[str], instructions: tuple[Instruction, ...], offset: int) -> None:
        writes: list[tuple[Instruction, str]] = []
        aliases: list[tuple[Instruction, str]] = []
        stores: list[str] = []
        for instruction in instructions:
            if instruction.opcode == "sphi":
                register = _physical(instruction.destination)
                value = self._register(f"R:{register}") if register else "U"
                lines.append(f" {self._register(instruction.destination)}={value}")
        for instruction in instructions:
            opcode = instruction.opcode
            if opcode == "sphi" or opcode.startswith(("sbr", *_WITHOUT_EFFECT)):
                continue
            if opcode.startswith("inlined_call_operand"):
                writes.append((instruction, self._call_operand(instruction)))
            elif opcode == "inlined_call":
                lines.append(f" t=S.call(t+{offset},{instruction.text!r})-{offset}")
            elif opcode.startswith(("dma", "vsyncadd")):
                self._copy_or_semaphore(lines, instruction, offset)
            elif opcode.startswith("vdelay"):
                delay = re.search(r"\d+", instruction.text)
                if delay:
                    lines.append(f" t+={max(int(delay[0]) - 1, 0)}")
            elif opcode == "sst":
                stores.append(self._store(instruction))
            elif opcode.startswith("sld"):
                writes.append((instruction, self._load(instruction)))
            elif instruction.destination[0] in "sp":
                target = aliases if opcode.startswith("int_to_ptr") else writes
                target.append((instruction, self._value(instruction)))
        for number, (_, value) in enumerate(writes):
            lines.append(f" x{number}={value}")
        lines.extend(store for store in stores if store)
        for number, (instruction, _) in enumerate(writes):
            self._write(lines, instruction, f"x{number}")
        for instruction, value in aliases:  # a pointer names what the same bundle computes
            self._write(lines, instruction, value)

    def _write(self, lines: list[str], instruction: Instruction, value: str) -> None:
        target = self._register(instruction.destination)
        physical = _physical(instruction.destination)
        targets = f"{target}={value}"
        if physical in self.phi_registers:
            targets = f"{target}={self._register(f'R:{physical}')}={value}"
        predicate = instruction.predicate
        if predicate is None:
            lines.append(f" {targets}")
        elif predicate.otherwise:
            otherwise = self._operand(predicate.otherwise)
            chosen = f"SEL({self._condition(predicate)},{value},{otherwise})"
            lines.append(f" {targets.removesuffix(value)}{chosen}")
        else:
            lines.append(f" if S.holds({self._condition(predicate)}): {targets}")

    # --- Kinds of instructions ---

    def _value(self, instruction: Instruction) -> str:
        operands = [self._operand(operand) for operand in instruction.operands]
        if instruction.opcode.startswith("int_to_ptr"):
            operands = [self._operand(instruction.text.split()[-1])] if instruction.text else []
        value = expression(instruction.opcode, operands)
        if value is None:
            self.warnings[f"unknown opcode {instruction.opcode}"] += 1
            return "U"
        if instruction.opcode.startswith(("scmp", "smin", "smax")) and len(operands) >= 2:
            destination = self._register(instruction.destination)
            comparison = (_reference(operands[0]), _reference(operands[1]), destination)
            self.comparisons.append(comparison)
        return value

    def _call_operand(self, instruction: Instruction) -> str:
        memory = instruction.opcode.partition(".")[2]
        number = re.search(r"index: (\d+)", instruction.text)
        index = int(number[1]) if number else -1
        is_output = "kind: output" in instruction.text
        shape = _SHAPE.search(instruction.text)
        self.operands[index, is_output] = (memory, shape[1] if shape else "")
        if memory in _MEMORY_OPERANDS:
            return str(operand_address(index, is_output=is_output))
        return f"S.scalar({index})"

    def _copy_or_semaphore(self, lines: list[str], instruction: Instruction, offset: int) -> None:
        opcode = instruction.opcode
        operands = [self._operand(operand) for operand in instruction.operands]
        guard = ""
        if instruction.predicate is not None:
            guard = f"if S.holds({self._condition(instruction.predicate)}): "
        if opcode.startswith("dma.done.wait"):
            if operands:
                amount = operands[1] if len(operands) > 1 else "0"
                lines.append(f" {guard}t=S.wait(t+{offset},{operands[0]},{amount})-{offset}")
        elif opcode.startswith("vsyncadd"):
            if len(operands) >= 2 and "remote" not in opcode:
                lines.append(f" {guard}S.signal(t+{offset},{operands[0]},{operands[1]})")
        elif len(operands) >= 3:
            named = re.match(r"dma\.(\w+?)_to_(\w+)", opcode)
            source, target = instruction.memories or (named.groups() if named else ("hbm", "vmem"))
            semaphore = operands[3] if len(operands) > 3 else "U"
            lines.append(
                f" {guard}S.copy(t+{offset},{source!r},{target!r},{operands[0]},{operands[1]},"
                f"{operands[2]},{semaphore})"
            )
        else:
            self.warnings[f"form of {opcode}"] += 1

    def _store(self, instruction: Instruction) -> str:
        found = _STORE.match(instruction.text)
        if found is None:
            self.warnings["form of sst"] += 1
            return ""
        cell, value = f"S.smem[{self._address(found[1])}]", self._operand(found[2])
        if instruction.predicate is None:
            return f" {cell}={value}"
        # Under a predicate that is not known the cell is not known either; that is no guess, and
        # matters only where it is read again (cores that meet at a barrier never do).
        before = f"S.smem.get({self._address(found[1])},U)"
        return f" {cell}=SEL({self._condition(instruction.predicate)},{value},{before})"

    def _load(self, instruction: Instruction) -> str:
        found = _LOAD.search(instruction.text)
        if found is None:
            self.warnings["form of sld"] += 1
            return "U"
        address = self._address(found[1])
        if "E[" in address:
            self.loads.append(address)
        return f"S.smem.get({address},U)"

    # --- Operands ---

    def _register(self, name: str) -> str:
        return f"E[{self.index.setdefault(name, len(self.index))}]"

    def _condition(self, predicate: Predicate) -> str:
        value = self._register(predicate.name)
        return f"NOT({value})" if predicate.negated else value

    def _operand(self, text: str) -> str:
        text = text.strip()
        if text.startswith("%"):
            return self._register(text[1:])
        if text.startswith("["):
            return self._address(text)
        if _NUMBER.match(text):
            value = int(text, 0)
            return str(((value + 0x80000000) & 0xFFFFFFFF) - 0x80000000)
        return "U"

    def _address(self, text: str) -> str:
        """``[smem:[#allocation5 + $0x1]]``, ``[#allocation4 + %s3]`` and the like."""
        inner = text.strip().removeprefix("[").removesuffix("]").removeprefix("smem:")
        inner = inner.removeprefix("[").removesuffix("]")
        terms = [self._term(term.strip()) for term in inner.split(" + ")]
        return terms[0] if len(terms) == 1 else f"s32({'+'.join(terms)})"

    def _term(self, term: str) -> str:
        allocation = _ALLOCATION.match(term)
        if allocation:
            return str(int(allocation[1]) << _ALLOCATION_BITS)
        if term.startswith("$"):
            return str(int(term[1:], 16))
        return self._operand(term)


def _physical(name: str) -> str | None:
    found = _PHYSICAL.match(name)
    return found[1] if found else None


def _reference(operand: str) -> Reference:
    return int(operand) if _NUMBER.match(operand) else operand


def operand_address(index: int, *, is_output: bool) -> int:
    """Return the address that the simulation gives to an operand in memory.

    Args:
        index: The operand's number.
        is_output: Whether it is an output.

    Returns:
        The address; different operands are far apart.
    """
    return ((index + 1) << OPERAND_BITS) + (1 << 30 if is_output else 0)


def call_operands(listing: Listing) -> dict[tuple[int, bool], tuple[str, str]]:
    """Return the operands of a kernel.

    Args:
        listing: Its code.

    Returns:
        Memory and shape by (number, whether it is an output).
    """
    translator = _Translator(listing, (0, 0), {"bf16": 0, "f32": 0, "8bit": 0})
    for bundle in listing.bundles:
        for instruction in bundle.scalar:
            if instruction.opcode.startswith("inlined_call_operand"):
                translator._call_operand(instruction)
    return translator.operands
