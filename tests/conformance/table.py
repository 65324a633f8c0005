"""The table of the cases: what CMSSW's test asserts, and our answers.

    python -m tests.conformance.table

The C++ library is installed into a folder of its own first.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pipeline.report.tables import new_table, show
from tests.conformance.cases import cases
from tests.conformance.running import program, ran
from tests.models.cplusplus import install


def main() -> None:
    table = new_table("Conformance", "case", "file", "asserts", "Python", "C++")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        program(install(folder), folder)
        for number, (name, case) in enumerate(cases().items()):
            own = folder / str(number)
            own.mkdir()
            done = ran(case, folder / "score", own)
            python = ", ".join(
                f"{engine}: {'right' if case.right(found) else 'WRONG'}"
                for engine, found in done.python.items()
            )
            cpp = "right" if case.right(done.cpp) else "WRONG"
            table.add_row(name, case.source, case.asserts, python, cpp)
    show([table])


if __name__ == "__main__":
    main()
