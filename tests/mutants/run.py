"""Do the tests of the pure files notice small faults? Cosmic Ray makes them, one at a time, in copies of this tree.

Of each file a sample is tried, the same whenever it is asked for with the same seed, and mostly the same after the file
has changed. What alters nothing but types and comments is no fault. A survivor is printed as `accepted.txt` wants it;
there each has a reason why nothing that anybody may rely on has changed, or why no test is worth its while.

Run by `make test-mutants`, with an environment of its own that has Cosmic Ray. Tests that wait for something may fail
where a machine does much else, and a fault passes for noticed then.
"""

from __future__ import annotations

import argparse
import ast
import difflib
import hashlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from queue import SimpleQueue
from typing import Any

from cosmic_ray.ast import ast_nodes, get_ast  # pyright: ignore[reportMissingImports]
from cosmic_ray.mutating import mutate_code  # pyright: ignore[reportMissingImports]
from cosmic_ray.plugins import get_operator, operator_names  # pyright: ignore[reportMissingImports]

ROOT = Path(__file__).resolve().parents[2]
HERE = ROOT / "tests/mutants"
COPIES = ROOT / "build/mutants"
PYTHON = ROOT / ".venv/bin/python"

NOTICED_MIN = 0.9
"""The share of what is not accepted that has to be noticed."""

IDENTITY = re.compile("ComparisonOperator_(?!Is_IsNot|IsNot_Is)(.*_)?Is")
"""Operators that nobody confuses: identity with equality, where of numbers and members both are the same, or order."""

PATIENCE, PATIENCE_S = 5, 20.0
"""Tests that take so many times as long as without the fault, and that longer, hang: that is noticed, too."""


@dataclass(frozen=True)
class Mutant:
    """A fault of a file: `code` is all of it, `line` counts from 1, `old` and `new` are what changes there."""

    path: str
    line: int
    old: str
    new: str
    code: str

    @property
    def name(self) -> str:
        return f"{self.path}: {self.old} -> {self.new}"


def mutants_of(path: str, seed: int) -> Iterator[Mutant]:
    """All of a file, in an order that is by chance, but the same for what has not changed."""
    source = (ROOT / path).read_text()
    tree, lines = get_ast(source), source.splitlines()
    places: list[tuple[bytes, Any, int]] = []
    for name in operator_names():
        operator_class = get_operator(name)
        if operator_class.arguments() or IDENTITY.search(name):
            continue
        operator = operator_class()
        found = [place for node in ast_nodes(tree) for place in operator.mutation_positions(node)]
        for occurrence, ((line, column), _) in enumerate(found):
            chance = hashlib.sha256(f"{seed} {path} {name} {column} {lines[line - 1]}".encode()).digest()
            places.append((chance, operator, occurrence))
    seen = {_meaning(source)}
    for _, operator, occurrence in sorted(places, key=lambda place: place[0]):
        code = mutate_code(source, operator, occurrence)
        try:
            meaning = _meaning(code)
        except SyntaxError:
            continue
        if meaning not in seen:
            seen.add(meaning)
            yield Mutant(path, *_change(source, code), code)


def _meaning(source: str) -> str:
    """The program without what only people and type checkers read."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.returns = None
        elif isinstance(node, ast.arg):
            node.annotation = None
        elif isinstance(node, ast.AnnAssign):
            node.annotation = ast.Constant(None)
    return ast.dump(tree)


def _change(source: str, code: str) -> tuple[int, str, str]:
    """The first line that differs, and what is there before and after."""
    before, after = source.splitlines(), code.splitlines()
    matcher = difflib.SequenceMatcher(None, before, after, autojunk=False)
    _, start, end, other, other_end = next(each for each in matcher.get_opcodes() if each[0] != "equal")
    old, new = (" ".join(" ".join(lines).split()) for lines in (before[start:end], after[other:other_end]))
    return start + 1, old, new


class Tree:
    """A copy of what is checked out here, for one process at a time."""

    def __init__(self, root: Path) -> None:
        self.root = root
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=ROOT,
            check=True,
            capture_output=True,
        ).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).exists():
                (root / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, root / name, follow_symlinks=False)
        # Its `satchel` comes before the one that is installed, which is the tree's this is a copy of.
        self._environment = os.environ | {"PYTHONPATH": str(root / ".typing"), "PYTHONPYCACHEPREFIX": ""}

    def test(self, tests: list[str], timeout_s: float) -> tuple[bool, str]:
        """Whether all pass, in time, and what was printed."""
        command = [PYTHON, "-m", "pytest", "-qx", "--tb=line", "--noconftest", "-p", "no:xdist"]
        process = subprocess.Popen(
            ["nice", *command, "-p", "no:cacheprovider", *tests],
            cwd=self.root,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )
        try:
            output, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
            return False, output
        return process.returncode == 0, output

    def notices(self, mutant: Mutant, tests: list[str], timeout_s: float) -> bool:
        path = self.root / mutant.path
        source = path.read_text()
        self._write(path, mutant.code)
        try:
            return not self.test(tests, timeout_s)[0]
        finally:
            self._write(path, source)

    @staticmethod
    def _write(path: Path, source: str) -> None:
        path.write_text(source)
        # What was compiled counts as of this source where that has the same size and was written in the same second.
        for compiled in (path.parent / "__pycache__").glob(f"{path.stem}.*.pyc"):
            compiled.unlink()


class Accepted:
    """The survivors that are listed with a reason: lines of `path: old -> new  # reason`, where `*` is anything."""

    def __init__(self, text: str) -> None:
        self._patterns: dict[str, re.Pattern[str]] = {}
        self.used: set[str] = set()
        for line in text.splitlines():
            if line.strip() and not line.startswith("#"):
                pattern, _, reason = line.rpartition("  # ")
                if not (pattern and reason.strip()):
                    raise SystemExit(f"accepted.txt: no reason in: {line}")
                self._patterns[line] = re.compile(re.escape(pattern.strip()).replace(r"\*", ".*"))

    def __contains__(self, mutant: Mutant) -> bool:
        found = [line for line, pattern in self._patterns.items() if pattern.fullmatch(mutant.name)]
        self.used.update(found)
        return bool(found)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="*", help="which pure files; all without")
    parser.add_argument("--sample", type=int, default=20, help="how many faults of each file; 0 for all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    given = parser.parse_args()
    tests = tomllib.loads((HERE / "tests.toml").read_text())
    files = given.files or list(tests)
    if unknown := [file for file in files if file not in tests]:
        raise SystemExit(f"not among the pure files: {', '.join(unknown)}")
    accepted = Accepted((HERE / "accepted.txt").read_text())
    shutil.rmtree(COPIES, ignore_errors=True)
    trees: SimpleQueue[Tree] = SimpleQueue()
    for number in range(given.jobs):
        trees.put(Tree(COPIES / str(number)))
    noticed = tried = reasons = 0
    with ThreadPoolExecutor(given.jobs) as pool:
        for file in files:
            named = [f"tests/{name}.py" for name in tests[file]]
            began = time.monotonic()
            tree = trees.get()
            passed, output = tree.test(named, 600.0)
            trees.put(tree)
            if not passed:
                raise SystemExit(f"{file}: its tests fail without a fault\n{output[-2000:]}")
            timeout_s = (time.monotonic() - began) * PATIENCE + PATIENCE_S

            def survives(mutant: Mutant, named: list[str] = named, timeout_s: float = timeout_s) -> bool:
                tree = trees.get()
                try:
                    return not tree.notices(mutant, named, timeout_s)
                finally:
                    trees.put(tree)

            mutants = list(islice(mutants_of(file, given.seed), given.sample or None))
            lived = [mutant for mutant, lives in zip(mutants, pool.map(survives, mutants), strict=True) if lives]
            known = [mutant for mutant in lived if mutant in accepted]
            left = [mutant for mutant in lived if mutant not in known]
            noticed, tried = noticed + len(mutants) - len(lived), tried + len(mutants) - len(known)
            reasons += len(known)
            also = f", {len(known)} accepted" if known else ""
            seconds = time.monotonic() - began
            print(f"{file}: noticed {len(mutants) - len(lived)}/{len(mutants)}{also} ({seconds:.0f} s)", flush=True)
            for mutant in left:
                print(f"  line {mutant.line}  {mutant.name}", flush=True)
    shutil.rmtree(COPIES, ignore_errors=True)
    share = noticed / max(1, tried)
    print(f"noticed {noticed}/{tried} ({share:.1%}) of those that are not accepted; {reasons} survivors are accepted")
    return 0 if share >= NOTICED_MIN else 1


if __name__ == "__main__":
    sys.exit(main())
