"""Artifacts for AVX-512 on a host that lacks it: `python -m tests.campaigns.avx512 [CONFIG ...]`.

qemu has no AVX-512; Bochs, an emulator of a whole computer, has. The engine `lanes` compiles each
network for x86-64-v3, which runs here, and for x86-64-v4, which runs in Bochs with its own Linux:
the test mode of the C++ library, on the whole reference. In the table, equal letters mean equal
bits. A network takes a few minutes, most of them to start that Linux.

    apt-get install bochs bochs-term bochsbios vgabios isolinux syslinux-common xorriso cpio \\
        busybox-static linux-image-amd64    # or only unpack that: --kernel names its vmlinuz
"""

from __future__ import annotations

import argparse
import base64
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from benchmarks.speed.gpu import captured_from
from benchmarks.speed.zoo import CONFIGS
from engines import Portable, Target, engine
from engines.errors import NotApplicableError
from stages.judging.emulate import Emulator, emulate_candidate
from stages.judging.validate import Trial, validate_candidate

_LIMIT_S = 3600.0
_BIOS = Path("/usr/lib/ISOLINUX/isolinux.bin"), Path("/usr/lib/syslinux/modules/bios/ldlinux.c32")
# Bochs and Linux compute different sizes of a compacted XSAVE area; Linux then disables AVX.
_BOOT = """DEFAULT it
PROMPT 0
LABEL it
 KERNEL /vmlinuz
 APPEND initrd=/initrd console=ttyS0 mitigations=off quiet clearcpuid=xsavec,xsaves rdinit=/init
"""
_MACHINE = """megs: 1024
cpu: model=corei7_skylake_x, count=1, ips=50000000, reset_on_triple_fault=0
romimage: file=/usr/share/bochs/BIOS-bochs-latest
vgaromimage: file=/usr/share/vgabios/vgabios.bin
ata0: enabled=1
ata0-master: type=cdrom, path={here}/boot.iso, status=inserted
boot: cdrom
com1: enabled=1, mode=file, dev={here}/serial
log: {here}/log
clock: sync=none
display_library: rfb, options="timeout=0"
panic: action=fatal
"""
_INIT = """#!/bin/busybox sh
/bin/busybox mount -t proc proc /proc
cd /
/bin/busybox echo "flag avx512f $(/bin/busybox grep -c -w avx512f /proc/cpuinfo)"
{command} >/out 2>/err
/bin/busybox echo "status $?"
for each in out err answers; do
  /bin/busybox echo "begin $each"; /bin/busybox base64 /$each; /bin/busybox echo "end $each"
done
/bin/busybox sleep 1
/bin/busybox poweroff -f
"""


def main(configs: list[Path], kernel: Path) -> int:
    print("| network | v3 here | v4 in Bochs | largest | bits |\n|", " --- |" * 5)
    wrong = 0
    for config in configs:
        with tempfile.TemporaryDirectory(prefix="soa-avx512-") as place:
            try:
                wrong += not compared(config, kernel, Path(place))
            except NotApplicableError as error:
                print(f"| {config.stem} | {error} |", flush=True)
    return wrong


def compared(config: Path, kernel: Path, place: Path) -> bool:
    made, tolerances = captured_from(config, place)
    trials = {}
    for level in ("v3", "v4"):
        out = place / level
        out.mkdir()
        target = Target.parse(f"cpu/x86-64-{level}")
        [library, *_] = engine("lanes").compile(Portable(made.program, None), target, {}, out)
        trials[level] = Trial("lanes", out / library, made.signature, made.reference, tolerances)
    here = validate_candidate(trials["v3"], place / "here", _LIMIT_S)
    command = (sys.executable, "-m", __spec__.name, "--kernel", str(kernel), "--run")
    bochs = Emulator("in Bochs", "x86_64", command)
    there = emulate_candidate(trials["v4"], place / "there", _LIMIT_S, target, emulator=bochs)
    largest = max((each.max_abs for each in there.worst.values()), default=0.0)
    equal = here.bits is not None and here.bits == there.bits
    said = there.verdict if there.worst else f"{there.verdict}: {there.reason}"
    cells = (config.stem, here.verdict, said, f"{largest:.1g}", "A A" if equal else "A B")
    print("|", " | ".join(cells), "|", flush=True)
    return equal and there.verdict == "emulated"


def run(kernel: Path, command: list[str]) -> int:
    """Run one command in Bochs and print its output; its last argument is a file to copy back."""
    *given, answers = command
    with tempfile.TemporaryDirectory(prefix="soa-bochs-") as place:
        here = Path(place)
        root = here / "root"
        files(root, given)
        line = " ".join([*given, "/answers"])
        (root / "init").write_text(_INIT.format(command=line))
        (root / "init").chmod(0o755)
        boot(here, root, kernel)
        said = (here / "serial").read_text(errors="replace").replace("\r", "")
    if "flag avx512f 1" not in said:
        raise SystemExit(f"no AVX-512 in Bochs: {said[-300:]}")
    sys.stdout.buffer.write(part(said, "out"))
    sys.stderr.buffer.write(part(said, "err"))
    Path(answers).write_bytes(part(said, "answers"))
    status = re.search(r"^status (\d+)$", said, re.M)
    assert status is not None
    return int(status[1])


def files(root: Path, given: list[str]) -> None:
    """Copies what a command needs of this host to the same paths: program, libraries, arguments."""
    loaded = subprocess.run(["ldd", given[0]], capture_output=True, text=True, check=True).stdout
    shutil.copytree(given[1], root / given[1][1:])  # the artifact's folder
    named = [each for each in given if each.startswith("/") and Path(each).is_file()]
    for name in (*named, *re.findall(r"(/\S+)", loaded)):
        (root / name[1:]).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(name, root / name[1:])
    for name in ("bin", "proc"):
        (root / name).mkdir(exist_ok=True)
    shutil.copy("/bin/busybox", root / "bin/busybox")


def boot(here: Path, root: Path, kernel: Path) -> None:
    disk = here / "disk"
    (disk / "isolinux").mkdir(parents=True)
    for each in _BIOS:
        shutil.copy(each, disk / "isolinux")
    (disk / "isolinux/isolinux.cfg").write_text(_BOOT)
    shutil.copy(kernel, disk / "vmlinuz")
    packed = f"cd {root} && find . | cpio -o -H newc --quiet | gzip -1 >{disk}/initrd"
    subprocess.run(packed, shell=True, check=True)
    image = ["-o", here / "boot.iso", "-b", "isolinux/isolinux.bin", "-c", "isolinux/boot.cat"]
    options = ["-no-emul-boot", "-boot-load-size", "4", "-boot-info-table"]
    subprocess.run(
        ["xorriso", "-as", "mkisofs", "-quiet", *map(str, image), *options, str(disk)], check=True
    )
    (here / "machine").write_text(_MACHINE.format(here=here))
    subprocess.run(
        ["bochs", "-q", "-f", here / "machine"], input="c\n", text=True, timeout=_LIMIT_S,
        capture_output=True,
    )  # fmt: skip


def part(said: str, name: str) -> bytes:
    found = re.search(rf"^begin {name}\n(.*?)^end {name}$", said, re.M | re.S)
    return base64.b64decode(found[1]) if found else b""


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("configs", nargs="*", type=Path, default=sorted(CONFIGS.glob("zoo/*.yaml")))
    parser.add_argument("--kernel", type=Path, required=True, help="a Linux, with AVX-512")
    parser.add_argument("--run", nargs=argparse.REMAINDER, help="one command in Bochs")
    asked = parser.parse_args()
    if asked.run:
        sys.exit(run(asked.kernel, asked.run))
    sys.exit(main(asked.configs, asked.kernel))
