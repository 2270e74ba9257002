"""Finds MMAs in compiled code for Hopper whose matrix descriptors are not set on every path that leads to them.

ptxas of CUDA 12.8 and 12.9 compiles some kernels with loops or branches to code that sets a descriptor on one path
only, or adds to a register that it has never set: MMAs then read shared memory at addresses that do not exist. The
descriptors of `gdesc[URn]` lie in URn, URn+1 (left operand in shared memory) and URn+2, URn+3 (right operand); the
upper halves are constants, the lower ones addresses of 14 bits.
"""

from __future__ import annotations

import re
import subprocess
import tempfile
from pathlib import Path

import triton

NVDISASM = Path(triton.__file__).parent / "backends/nvidia/bin/nvdisasm"
_LABEL = re.compile(r"^\.(L_x_\d+):")
_INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]+)\*/\s+(?:@(!?U?P\w+)\s+)?(\S+)\s*(.*?)\s*;\s*$")
_REGISTER = re.compile(r"\bUR(\d+|Z)\b")

State = dict[int, str]  # of a uniform register: "high" constant of a descriptor, or "low" address; else it is left out


def disassemble(cubin: bytes) -> str:
    """Return the machine code of a kernel as text."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        return subprocess.run([NVDISASM, "-c", "-ndf", file.name], capture_output=True, text=True, check=True).stdout


def _number(operand: str) -> int | None:
    """Return a constant operand, or None."""
    return int(operand, 0) if re.fullmatch(r"-?(0x[0-9a-f]+|\d+)", operand) else 0 if operand == "URZ" else None


def _kind(operand: str, state: State) -> str | None:
    """Return whether an operand is half of a descriptor."""
    number, register = _number(operand), re.fullmatch(r"UR(\d+)", operand)
    if number is not None:  # swizzles are bits 62 and 63; the stride, bits 32 to 45, is 0 for tiles of 8 columns
        return "high" if number & 0xC0000000 else "low" if 0 <= number < 1 << 30 else None
    return state.get(int(register[1])) if register else None


def _exclusive_or(a: str | None, b: str | None) -> str | None:
    """Return "x^y" for x and y, and y for "x^y" and x."""
    if a is None or b is None:
        return None
    parts = [*a.split("^"), *b.split("^")]
    left = [x for x in parts if parts.count(x) == 1]
    return "^".join(sorted(left)) or None


def _sum_of_pairs(sources: list[str], state: State) -> tuple[str | None, str | None]:
    """Return what the halves of a 64-bit sum are; a source with a sign is a constant, negated."""
    pairs = []
    for source in sources[:2]:
        if register := re.fullmatch(r"UR(\d+)", source):
            pairs.append((state.get(int(register[1])), state.get(int(register[1]) + 1)))
        else:
            pairs.append(("low", "low") if _number(source) is not None else ("copy", "copy"))
    low, high = zip(*pairs, strict=True)
    defined = None not in high and {"high", "copy"} & {*high}
    return None if None in low else "low", "high" if defined else None


def _step(op: str, operands: list[str], state: State) -> None:
    """Apply an instruction to the state of the uniform registers."""
    base, target = op.split(".")[0], re.fullmatch(r"UR(\d+)", operands[0]) if operands else None
    if target is None:
        return
    to = int(target[1])
    sources = [o for o in operands[1:] if not re.fullmatch(r"!?UPT?\d?", o)]
    kinds = [_kind(o, state) for o in sources]
    if op == "UIADD3.64":
        pair = _sum_of_pairs(sources, state)
        made = dict(zip((to, to + 1), pair, strict=True))
    elif base == "UMOV":
        made = {to: kinds[0]}
    elif op == "UIADD3.X":
        made = {to: "high" if {"high", "copy"} & {*kinds} else None}
    elif base == "ULOP3" and "0x3c" in sources:  # of three that exchange two registers
        made = {to: _exclusive_or(kinds[0], kinds[1])}
    elif base == "R2UR":
        made = {to: "copy"}  # of a register, which holds what was computed before
    elif base in ("UIADD3", "ULOP3", "USGXT", "USEL"):
        low = base == "USGXT" or (base == "ULOP3" and "0x3fff" in sources) or kinds[0] in ("low", "copy")
        made = {to: "low" if low else None}
    else:
        wide = re.search(r"\.(64|WIDE|128)\b", op) is not None
        made = dict.fromkeys(range(to, to + (4 if ".128" in op else 2 if wide else 1)))
    for register, kind in made.items():
        state.pop(register, None)
        if kind:
            state[register] = kind


def unset_descriptors(code: str) -> list[str]:
    """Return the MMAs of a kernel, as text, that read a descriptor which is not set on some path."""
    blocks: dict[str, list[tuple[str, str | None, str, list[str]]]] = {"": []}
    follows: dict[str, list[str]] = {"": []}
    label = ""
    for line in code.splitlines():
        if found := _LABEL.match(line):
            if not blocks[label] or not _ends(blocks[label][-1]):
                follows[label].append(found[1])
            label = found[1]
            blocks[label], follows[label] = [], []
        elif found := _INSTRUCTION.match(line):
            place, guard, op, rest = found.groups()
            blocks[label].append((place, guard, op, [o.strip() for o in rest.split(",")] if rest else []))
            target = re.search(r"\((?:\.)?(L_x_\d+)\)", rest)
            if target and op.startswith("BRA"):
                follows[label].append(target[1])
                label += "'"  # what follows a branch is a block of its own
                blocks[label], follows[label] = [], []
                if guard:
                    follows[label[:-1]].append(label)
    return _flow(blocks, follows)


def _ends(instruction: tuple[str, str | None, str, list[str]]) -> bool:
    """Return whether control does not pass an instruction."""
    _, guard, op, _ = instruction
    return guard is None and op.split(".")[0] in ("BRA", "EXIT", "RET")


def _merge(a: State, b: State) -> State:
    """Return what holds in both states; a copy of a register counts as either half."""
    both = {r: (x, b[r]) for r, x in a.items() if r in b}
    return {r: x if x == y else "copy" for r, (x, y) in both.items() if x == y or "copy" in (x, y)}


def _flow(blocks: dict[str, list[tuple[str, str | None, str, list[str]]]], follows: dict[str, list[str]]) -> list[str]:
    """Return the MMAs that read unset descriptors, from the states at the starts of blocks."""
    starts: dict[str, State] = {"": {}}
    pending = [""]
    while pending:
        label = pending.pop()
        state = dict(starts[label])
        for _, guard, op, operands in blocks[label]:
            before = dict(state)
            _step(op, operands, state)
            if guard:
                state = {r: kind for r, kind in state.items() if before.get(r) == kind}
        for after in follows[label]:
            defined = starts.get(after)
            merged = dict(state) if defined is None else _merge(defined, state)
            if merged != defined:
                starts[after] = merged
                pending.append(after)
    wrong = []
    for label, start in starts.items():
        state = dict(start)
        for place, guard, op, operands in blocks[label]:
            if op.startswith("HGMMA"):
                text = ", ".join(operands)
                n = int(re.findall(r"gdesc\[UR(\d+)\]", text)[0])
                from_registers = re.match(r"R\w+, R\d+,", text) is not None
                needed = (
                    ((n + 2, "low"), (n + 3, "high"))
                    if from_registers
                    else ((n, "low"), (n + 1, "high"), (n + 2, "low"), (n + 3, "high"))
                )
                missing = [f"UR{r}" for r, kind in needed if state.get(r) not in (kind, "copy")]
                if missing:
                    wrong.append(f"/*{place}*/ {op} {text}: {', '.join(missing)}")
            before = dict(state)
            _step(op, operands, state)
            if guard:
                state = {r: kind for r, kind in state.items() if before.get(r) == kind}
    return wrong
