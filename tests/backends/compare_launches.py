"""Compares two files of dump_launches.py, of a version before and after a change that gives kernels other names.

    python tests/backends/compare_launches.py BEFORE AFTER

A launch is compared by its grid, operands, numbers, the values of its constants in their order, and, of files made with
--compile or --gpu, the resources and PTX of its kernel; the names of kernels and constants do not count. Launches of a
call are aligned by grid and constants, and their operands are compared where both calls have the same steps. What else
a call does, such as allocations, is compared by how often it makes which result. The answer counts what is equal, names
the kernels that became others, and shows the first difference of each kind.
"""

from __future__ import annotations

import difflib
import itertools
import re
import sys
from collections import Counter, defaultdict
from pathlib import Path

LAUNCH = re.compile(r"(\w+)\[(\(.*?\))\] ([^|]*) \| (.*?)(?: -> (.*))?$")
Parts = dict[str, str]


def calls(text: str) -> dict[str, list[str]]:
    """Return the lines of each call by its name."""
    return {call.partition("\n")[0]: call.splitlines()[1:] for call in text.split("##\n")[1:]}


def parts(line: str) -> tuple[str, Parts]:
    """Return the kernel of a launch, and what is compared by its name."""
    found = LAUNCH.match(line)
    if found is None:
        return "(none)", {}
    kernel, grid, operands, constants, made = found.groups()
    values = " ".join(x.partition("=")[2] for x in constants.split(" "))
    resources = dict(x.split("=") for x in (made or "").split())
    return kernel, {"grid": grid, "operands": operands, "constants": values} | resources


def made(lines: list[str]) -> Counter[str]:
    """Return how often a call makes which result, by its shape, strides and dtype or as a descriptor."""
    return Counter(re.sub(r"^%.*? = (new |do .*?-> )", "", line) for line in lines if line.startswith("%"))


def aligned(old: list[str], new: list[str]) -> list[tuple[str, str]]:
    """Return the pairs of launches of two calls, "" where one call has no such launch."""
    old, new = ([line for line in lines if LAUNCH.match(line)] for lines in (old, new))
    keys = ([(p["grid"], p["constants"]) for _, p in map(parts, lines)] for lines in (old, new))
    pairs: list[tuple[str, str]] = []
    for _, i, j, k, n in difflib.SequenceMatcher(None, *keys, autojunk=False).get_opcodes():
        pairs += itertools.zip_longest(old[i:j], new[k:n], fillvalue="")
    return pairs


def main(before: str, after: str) -> None:
    old, new = (calls(Path(name).read_text("utf-8")) for name in (before, after))
    both = [name for name in old if name in new]
    for name in sorted({*old, *new} - {*both}):
        print("only in", before if name in old else after, name)
    names: Counter[tuple[str, str]] = Counter()
    equal: Counter[str] = Counter()
    different: dict[tuple[str, str], list[str]] = defaultdict(list)
    for call in both:
        kinds = [[LAUNCH.sub("", line).partition(" = ")[0] for line in lines] for lines in (old[call], new[call])]
        for what in ("results made", "results"):
            x, y = (made(c[call]) if "made" in what else [s for s in c[call] if s.startswith(what)] for c in (old, new))
            if x == y:
                equal[what] += 1
            else:
                only = (sorted(x - y), sorted(y - x)) if isinstance(x, Counter) and isinstance(y, Counter) else (x, y)
                different[what, "a call"].append(f"{call}\n    {only[0]}\n    {only[1]}")
        for a, b in aligned(old[call], new[call]):
            (old_kernel, x), (new_kernel, y) = parts(a), parts(b)
            names[old_kernel, new_kernel] += 1
            for what in x if x and y else ():
                if what == "operands" and kinds[0] != kinds[1]:
                    continue
                if x[what] == y[what]:
                    equal[what] += 1
                else:
                    different[what, new_kernel].append(f"{call}\n    {a}\n    {b}")
    print(f"{len(both)} calls, {sum(names.values())} launches")
    print("equal:", ", ".join(f"{what} {count}" for what, count in equal.items()))
    for (a, b), count in sorted(names.items()):
        print(f"  {a} is {b}: {count} launches")
    for (what, kernel), found in sorted(different.items()):
        print(f"different {what} of {kernel}: {len(found)}, first in {found[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
