"""Counts lines of code by folder: Python, stubs and C++, without blank lines, comments and
docstrings. `python .ci/lines.py [FOLDER]`; FOLDER is a checkout, by default this one."""

from __future__ import annotations

import ast
import io
import re
import sys
import tokenize
from pathlib import Path

PRODUCT = ("soa", "engines", "stages", "registry", "runtime", "serving", "pipeline")
_NO_CODE = (
    tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT,
    tokenize.ENDMARKER,
)  # fmt: skip


def count_python(text: str) -> int:
    """The lines of a Python file or stub that hold code."""
    docstrings: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            first = node.body[0] if node.body else None
            if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant):
                docstrings |= set(range(first.lineno, (first.end_lineno or 0) + 1))
    tokens = tokenize.generate_tokens(io.StringIO(text).readline)
    rows = (range(t.start[0], t.end[0] + 1) for t in tokens if t.type not in _NO_CODE)
    return len({row for span in rows for row in span} - docstrings)


def count_cpp(text: str) -> int:
    """The lines of a C++ or CUDA file that hold code."""
    lines = re.sub(r"/\*.*?\*/", "", text, flags=re.DOTALL).splitlines()
    return sum(bool(line.strip()) and not line.strip().startswith("//") for line in lines)


def count_folder(folder: Path) -> int:
    """The lines of all files below a folder."""
    kinds = {".py": count_python, ".pyi": count_python}
    kinds |= dict.fromkeys((".cpp", ".h", ".hpp", ".cu"), count_cpp)
    files = (path for path in folder.rglob("*") if path.suffix in kinds)
    return sum(kinds[path.suffix](path.read_text()) for path in files)


if __name__ == "__main__":
    root = Path(sys.argv[1] if len(sys.argv) > 1 else Path(__file__).parents[1])
    counts = {name: count_folder(root / name) for name in (*PRODUCT, "tests")}
    for name, count in counts.items():
        print(f"{count:7,} {name}")
    print(f"{sum(counts[name] for name in PRODUCT):7,} product")
