"""Run the benchmarks, one after another: `python -m benchmarks [NAME ...]`.

`python -m benchmarks --results [NAME ...]` writes their output to RESULTS.md.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from benchmarks.table import machine
from soa.files import write_whole

_ZOO = [f"configs/zoo/{name}.yaml" for name in ("deep_sets", "mlp", "particle_transformer")]
RESULTS = Path(__file__).with_name("RESULTS.md")


@dataclass(frozen=True)
class Section:
    """A section of RESULTS.md: a title, what the reader must know, a module and its arguments."""

    title: str
    text: str
    module: str
    arguments: str = ""

    @property
    def command(self) -> str:
        """The command line that runs it."""
        return f"python -m benchmarks.{self.module} {self.arguments}".rstrip()

    def run(self, output: int | None = None) -> str:
        """Run it in a process of its own: threads and memory of one must not affect the next.
        Returns what it printed, if `output` is subprocess.PIPE."""
        command = [sys.executable, *self.command.split()[1:]]
        return subprocess.run(command, stdout=output, text=True, check=True).stdout or ""


SECTIONS = {
    "overhead": Section(
        "What a call costs",
        "`Ours` is the engine `lanes`. Peers take rows, which are packed before the clock starts.",
        "speed.overhead",
    ),
    "copies": Section(
        "Copies against none",
        "Columns in, columns out. A peer packs rows, computes, and unpacks; ours is bound once.",
        "speed.copies", "10 1000 100000",
    ),
    "threads": Section(
        "Two threads",
        "Events a second by threads that share a session. Then one call whose rows are shared, µs. "
        "`busy`: processor time over wall time. `two callers`: two threads that share nothing.",
        "speed.threads",
    ),
    "jagged": Section(
        "Jagged columns",
        "DeepSets on up to 16 jets an event, from Awkward's memory.",
        "speed.jagged", "10000",
    ),
    "gnn": Section(
        "A graph network",
        "Nodes and edges have rows of their own, so the engine is `aoti`.",
        "speed.gnn", "1000",
    ),
    "apply": Section(
        "Files",
        "`pipeline apply` beside scripts that users write with uproot, Parquet and ONNX Runtime.",
        "serving.apply", "1000000",
    ),
    "zoo": Section(
        "The zoo",
        "Peers: eager torch, torch.compile (also max-autotune), TorchScript, AOTInductor, ONNX "
        "Runtime and OpenVINO, on rows; AOTInductor on columns. The ratio is to the best one.",
        "speed.zoo", f"configs/demo.yaml {' '.join(_ZOO)}",
    ),
    "unseen": Section(
        "Networks that are not in the zoo",
        "Code for few rows and wide layers was tuned on them. The same peers, and JAX on columns.",
        "speed.zoo",
        "--unseen pointwise_first transformer_block small_resnet edge_conv line_segments mlp_256",
    ),
    "peak": Section(
        "Share of the core's peak",
        "Only products and convolutions count as work. With as many of them, no program can be "
        "much faster than the small ResNet and the MLP are.",
        "speed.peak",
    ),
    "one_launch": Section(
        "Selection in one loop",
        "The loop is that of examples/kernel, with `row` of two headers; calls compute columns of "
        "all tracks.",
        "speed.one_launch",
    ),
    "headers": Section(
        "Headers",
        "Networks as C++ headers (`pipeline source`): seconds of compilers, and `rows` beside the "
        "library, µs for 1,000 rows.",
        "speed.headers",
    ),
    "trees": Section(
        "Boosted trees",
        "LightGBM's `binary`, trees x leaves; a peer's time is relative to ours. Beyond 20,000 "
        "leaves lleaves compiles for more than eight minutes.",
        "speed.trees",
    ),
    "memory": Section("Memory", "Whole processes.", "memory.weights"),
    "start": Section(
        "Starting", "Whole processes; the median of five.", "memory.start", "--processes 5"
    ),
}  # fmt: skip


_HEAD = """\
# Measured

Made by `python -m benchmarks --results`. Machine: {machine}; one thread unless a table says
otherwise. Contestants take turns in one process, so ratios are more reliable than times. Figures of
a GPU: docs/results/gpu.md. A spread is p05 … p95, or (p95 - p05) / median in %.
"""


def measured(section: Section) -> str:
    """A section of RESULTS.md, measured now."""
    print(f"== {section.command}", file=sys.stderr, flush=True)
    begun = time.monotonic()
    text = re.sub(r"\x1b\[[\d;]*m", "", section.run(subprocess.PIPE))  # colours
    lines = [line.rstrip() for line in text.splitlines() if line.strip()]
    output = "\n".join(line for line in lines if line != machine())  # the head names the machine
    when = f"{datetime.now(UTC):%Y-%m-%d}, {(time.monotonic() - begun) / 60:.1f} minutes"
    return (
        f"## {section.title}\n\n`{section.command}` ({when})\n\n{section.text}\n\n"
        f"```\n{output}\n```\n"
    )


def measured_before(section: Section, texts: Sequence[str]) -> str:
    """A section as one of these texts of RESULTS.md has it; "" if none is of the same command."""
    for text in texts:
        if text.startswith(f"{section.title}\n") and f"`{section.command}` (" in text:
            return f"## {text.rstrip()}\n"
    return ""


def write_results(names: Sequence[str]) -> None:
    """Measure these sections of RESULTS.md, and write the file after each. Other sections stay as
    they are, if their command is still the same."""
    before = RESULTS.read_text().split("\n## ")[1:] if RESULTS.exists() else []
    parts = {name: measured_before(section, before) for name, section in SECTIONS.items()}
    for name in names:
        parts[name] = measured(SECTIONS[name])
        present = [part for part in parts.values() if part]
        write_whole(RESULTS, "\n".join([_HEAD.format(machine=machine()), *present]))


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SECTIONS)}")
    parser.add_argument("--results", action="store_true", help="write the output to RESULTS.md")
    options = parser.parse_args()
    names = options.names or [*SECTIONS]
    if options.results:
        write_results(names)
        return
    for name in names:
        print(f"\n== {SECTIONS[name].command}\n", flush=True)
        SECTIONS[name].run()


if __name__ == "__main__":
    main()
