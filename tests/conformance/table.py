"""The table of the cases: what CMSSW's test asserts, and our answers.

    python -m tests.conformance.table

The C++ library is installed into a folder of its own first. The cases of SONIC need a Triton, and a
session at a server is there by Python only.
"""

from __future__ import annotations

import tempfile
from pathlib import Path

from pipeline.report.tables import new_table, show
from serving.errors import ServerError
from serving.local.triton import find_triton
from tests.conformance.cases import cases
from tests.conformance.running import program, ran
from tests.conformance.sonic import SONIC, Servers
from tests.models.cplusplus import install


def main() -> None:
    """Runs all cases and prints the table."""
    table = new_table("Conformance", "case", "file", "asserts", "Python", "C++")
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch)
        program(install(folder), folder)
        for number, (name, case) in enumerate(cases().items()):
            own = folder / str(number)
            own.mkdir()
            done = ran(case, folder / "score", own)
            python = ", ".join(
                f"{engine}: {'right' if case.right(columns) else 'WRONG'}"
                for engine, columns in done.python.items()
            )
            cpp = "right" if case.right(done.cpp) else "WRONG"
            table.add_row(name, case.source, case.asserts, python, cpp)
        (folder / "sonic").mkdir()
        for name, done_by in by_servers(folder / "sonic").items():
            table.add_row(name, SONIC[name].source, SONIC[name].asserts, done_by, "-")
    show([table])


def by_servers(folder: Path) -> dict[str, str]:
    """The results of SONIC's cases, by name."""
    try:
        find_triton()
    except ServerError as error:
        return dict.fromkeys(SONIC, f"not run: {error}")
    with Servers.made(folder) as servers:
        holds = {name: case.holds(servers) for name, case in SONIC.items()}
    return {name: "right" if right else "WRONG" for name, right in holds.items()}


if __name__ == "__main__":
    main()
