"""Six models from `pipeline init` to a bound session, as docs/howto/init.md says; nothing edited.

    python -m tests.campaigns.first_model                  # all: about half an hour on two cores
    python -m tests.campaigns.first_model hzz xgboost --work /tmp/first

For each model: `init` runs on a terminal of its own, where Enter answers every question; `run`,
`promote` and `load` use a registry of its own; the rows of its file are bound as they were read;
and the answers are compared with those of the network's own library. The table has the seconds of
each step, the number of questions, and the largest difference.
"""

from __future__ import annotations

import argparse
import json
import os
import pty
import select
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

ROOT = Path(__file__).resolve().parents[2]
_PATHS = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
_OURS = os.environ | {"PYTHONPATH": os.pathsep.join(_PATHS)}
Array = npt.NDArray[Any]
Given = dict[str, Any]
"""The memory that a session is bound to, by collection."""
JETS = 200
# The first configuration in weaver-core's own example, with the kinematic inputs.
WEAVER = """\
new_variables:
  part_mask: ak.ones_like(part_energy)
  part_pt_log: np.log(part_pt)
  part_e_log: np.log(part_energy)
  part_logptrel: np.log(part_pt/jet_pt)
  part_logerel: np.log(part_energy/jet_energy)
  part_deltaR: np.hypot(part_deta, part_dphi)
preprocess: {method: manual}
inputs:
  pf_points:
    length: 128
    vars: [[part_deta, null], [part_dphi, null]]
  pf_features:
    length: 128
    vars:
      - [part_pt_log, 1.7, 0.7]
      - [part_e_log, 2.0, 0.7]
      - [part_logptrel, -4.7, 0.7]
      - [part_logerel, -4.7, 0.7]
      - [part_deltaR, 0.2, 4.0]
      - [part_deta, null]
      - [part_dphi, null]
  pf_vectors:
    length: 128
    vars: [[part_px, null], [part_py, null], [part_pz, null], [part_energy, null]]
  pf_mask:
    length: 128
    vars: [[part_mask, null]]
labels:
  type: simple
  value: [label_QCD, label_Hbb, label_Hcc, label_Hgg, label_H4q, label_Hqql, label_Zqq, label_Wqq,
    label_Tbqq, label_Tbl]
"""


@dataclass(frozen=True)
class Show:
    """A model to try.

    `words` follow `pipeline init`. `given` makes the collections to bind from some rows of its
    file. `told` is a pair: a hint, and other words with which `run` is tried first; it must refuse
    them with this hint.
    """

    words: list[str]
    given: Callable[[Any, slice], Given]
    expected: Callable[[], Array]
    told: tuple[str, list[str]] | None = None


def nanoaod(folder: Path) -> Show:
    """The jets of all events of the NanoAOD file, one per row."""
    import awkward as ak
    import uproot

    from examples.nanoaod.data import locate
    from examples.nanoaod.model import INPUTS, build

    names = [f"Jet_{name}" for name in INPUTS]
    weights = ROOT / "examples/nanoaod/weights.safetensors"
    model = _loaded(build(), weights)
    read = uproot.open(locate())["Events"].arrays(names)
    columns = {name: ak.to_numpy(ak.flatten(read[name])) for name in names}
    words = [f"{ROOT}/examples/nanoaod/model.py:build", str(locate()), "--weights", str(weights)]
    words += ["--input", f"jets={','.join(names)}", "--flatten", "--output", "p=p_light,p_c,p_b"]
    rows = np.stack([columns[name].astype(np.float32) for name in names], axis=1)
    return Show(
        words,
        lambda session, rows: _flat(session, "Jet", columns, rows),
        lambda: _eager(model, rows),
    )


def hzz(folder: Path) -> Show:
    """Events with jagged jets and muons, which the artifact pads."""
    import awkward as ak
    import uproot

    from examples.hzz.model import build
    from examples.nanoaod.data import locate
    from soa.memory import from_jagged

    file = locate("uproot-HZZ.root")
    jets, muons = (["Jet_Px", "Jet_Py", "Jet_Pz"], ["Muon_Px", "Muon_Py", "Muon_Pz", "Muon_E"])
    events = uproot.open(file)["events"].arrays([*jets, *muons])

    def padded(names: list[str], axis: int) -> tuple[Array, Array]:
        there = [ak.pad_none(events[name], 5, clip=True) for name in names]
        rows = [ak.to_numpy(ak.fill_none(each, np.float32(0))) for each in there]
        return np.stack(rows, axis=axis), ~ak.to_numpy(ak.is_none(there[0], axis=1))

    def expected() -> Array:
        (x, exists), (y, others) = padded(jets, 1), padded(muons, 2)
        mask = exists[:, None].astype(np.float32)
        return _eager(build().eval(), x, mask, y, others)

    def given(session: Any, rows: slice) -> Given:
        found: Given = from_jagged(events[rows], session.signature, "Jet")
        return found | from_jagged(events[rows], session.signature, "Muon")

    words = [f"{ROOT}/examples/hzz/model.py:build", str(file), "--input", f"jets={','.join(jets)}"]
    words += ["--input", f"muons={','.join(muons)}", "--input", "muon_exists=mask", "--length", "5"]
    return Show(words, given, expected)


def particlenet(folder: Path) -> Show:
    """The trained ParticleNet of weaver, with its data config, on 128 particles."""
    from examples.nanoaod.data import locate
    from examples.particlenet.model import build

    columns, weights = _jets(folder), locate("ParticleNet_kin.pt")
    sizes: dict[str, Any] = {"input_dims": 7, "num_classes": 10, "fc_params": [[256, 0.1]]}
    sizes |= {"conv_params": [[16, [width] * 3] for width in (64, 128, 256)]}
    sizes |= {"use_fusion": False, "use_fts_bn": True, "use_counts": True, "for_inference": True}
    words = ["weaver.nn.model.ParticleNet:ParticleNet", "jets.npz", "--weights", str(weights)]
    words += ["--kwargs", json.dumps(sizes), "--weaver", "JetClass_kin.yaml"]
    model, rows = _loaded(build(), weights), _rows(columns)
    return Show(
        words, lambda s, rows: _flat(s, "events", columns, rows), lambda: _eager(model, *rows)
    )


def transformer(folder: Path) -> Show:
    """The stock Particle Transformer of weaver-core, small, with random weights."""
    from safetensors.torch import save_file
    from weaver.nn.model.ParticleTransformer import ParticleTransformer

    from examples.particlenet.model import ParticleNetOnColumns

    columns = _jets(folder)
    sizes = {"input_dim": 7, "num_classes": 10, "embed_dims": [32, 32], "pair_embed_dims": [16, 16]}
    sizes |= {"num_heads": 4, "num_layers": 2, "num_cls_layers": 1}
    torch.manual_seed(1)
    model = ParticleTransformer(**sizes).eval()
    save_file(model.state_dict(), folder / "part.safetensors")

    def expected() -> Array:  # as published, with trimming
        particles, jet = map(torch.from_numpy, _rows(columns))
        with torch.no_grad():
            _, features, mask = ParticleNetOnColumns(model).prepare(particles, jet)
            names = ("part_px", "part_py", "part_pz", "part_energy")
            vectors = torch.stack([torch.from_numpy(columns[name]) for name in names], dim=1)
            return np.asarray(model(features, vectors * mask, mask))

    words = ["weaver.nn.model.ParticleTransformer:ParticleTransformer", "jets.npz"]
    words += ["--weights", "part.safetensors", "--weaver", "JetClass_kin.yaml"]
    words += ["--input", "x=pf_features", "--input", "v=pf_vectors", "--kwargs"]
    first, then = (json.dumps({**sizes, **more}) for more in ({}, {"trim": False}))
    told = ("trim: false", [*words, first])
    return Show([*words, then], lambda s, rows: _flat(s, "events", columns, rows), expected, told)


def onnx(folder: Path) -> Show:
    """The trained jet tagger of examples/, as the ONNX file that torch exports."""
    import onnxruntime

    from engines.exported import quiet_torch
    from examples.jet_tagger.generate import jets
    from examples.jet_tagger.model import JetTagger

    columns: dict[str, Array] = dict(jets(JETS, 1)[0])
    np.savez(folder / "jets.npz", allow_pickle=False, **columns)
    inside, jet = ["part_pt", "part_energy", "part_deta", "part_dphi"], ["pt", "eta", "mass"]
    rows = [np.stack([columns[name] for name in names], axis=1) for names in (inside, jet)]
    model = _loaded(JetTagger(), ROOT / "examples/jet_tagger/weights.safetensors")
    file = folder / "tagger.onnx"
    with quiet_torch():
        example = tuple(torch.from_numpy(each[:5]) for each in rows)
        names: dict[str, Any] = {"input_names": ["particles", "jet"], "output_names": ["p"]}
        shapes = ({0: "n"}, {0: "n"})
        torch.onnx.export(model, example, file, dynamo=True, dynamic_shapes=shapes, **names)
    words = ["tagger.onnx", "jets.npz", "--input", f"particles={','.join(inside)}"]
    words += ["--input", f"jet={','.join(jet)}"]

    def expected() -> Array:
        session = onnxruntime.InferenceSession(file)
        found = session.run(None, {"particles": rows[0], "jet": rows[1]})  # the label too
        return np.concatenate([np.asarray(each).reshape(JETS, -1) for each in found], axis=1)

    return Show(words, lambda session, rows: _flat(session, "events", columns, rows), expected)


def xgboost(folder: Path) -> Show:
    """A hundred trees of depth 6 on the flat columns of the Zmumu file."""
    import uproot
    import xgboost as library

    from examples.nanoaod.data import locate

    file = locate("uproot-Zmumu.root")
    names = ["pt1", "eta1", "phi1", "Q1", "pt2", "eta2", "phi2", "Q2"]
    columns = uproot.open(file)["events"].arrays([*names, "M"], library="np")
    table = np.stack([columns[name] for name in names], axis=1)
    rows = library.DMatrix(table, columns["M"], feature_names=names)
    booster = library.train({"max_depth": 6, "nthread": 1}, rows, 100)
    booster.save_model(folder / "mass.json")
    words = ["mass.json", str(file), "--output", "output=mass"]
    expected = booster.predict
    return Show(
        words, lambda s, rows: _flat(s, "events", columns, rows), lambda: expected(rows)[:, None]
    )


SHOWS = {show.__name__: show for show in (nanoaod, hzz, particlenet, transformer, onnx, xgboost)}


def _loaded(model: torch.nn.Module, weights: Path) -> torch.nn.Module:
    from stages.model import read_state

    model.load_state_dict(read_state(weights))
    return model.eval()


def _eager(model: torch.nn.Module, *rows: Array) -> Array:
    with torch.no_grad():
        found: Tensor = model(*map(torch.from_numpy, rows))
    return found.numpy()


def _jets(folder: Path) -> dict[str, Array]:
    """Writes jets of 128 particles to `jets.npz` and weaver's data config; returns the columns."""
    from examples.particlenet.model import reference

    columns: dict[str, Array] = dict(reference({"n": JETS}, 1)["jets"])
    columns |= {"jet_pt": columns.pop("pt"), "jet_energy": columns.pop("energy")}
    pt, eta, phi = (columns[f"part_{name}"] for name in ("pt", "deta", "dphi"))
    columns |= {"part_px": pt * np.cos(phi), "part_py": pt * np.sin(phi)}
    columns |= {"part_pz": pt * np.sinh(eta)}
    np.savez(folder / "jets.npz", allow_pickle=False, **columns)
    (folder / "JetClass_kin.yaml").write_text(WEAVER)
    return columns


def _rows(columns: dict[str, Array]) -> tuple[Array, Array]:
    particles = [columns[f"part_{name}"] for name in ("pt", "energy", "deta", "dphi")]
    jet = [columns["jet_pt"], columns["jet_energy"]]
    return np.stack(particles, axis=1), np.stack(jet, axis=1)


def _flat(session: Any, collection: str, columns: dict[str, Array], rows: slice) -> Given:
    from soa.memory import as_collection

    layout = session.layout(collection)
    given = {column.name: columns[column.name][rows] for column in layout.columns}
    return {collection: as_collection(given, layout)}


def typed(folder: Path, *words: str) -> tuple[str, int]:
    """The output of `pipeline` where Enter answers each question, and the number of questions.

    Raises SystemExit where it fails, or asks a question that Enter does not answer.
    """
    ours, its = pty.openpty()
    command = [sys.executable, "-m", "soa_pipeline", *words]
    process = subprocess.Popen(command, cwd=folder, env=_OURS, stdin=its, stdout=its, stderr=its)
    os.close(its)
    text, questions = "", 0
    while True:
        if not select.select([ours], [], [], 0.3)[0]:
            if text.endswith(": "):
                os.write(ours, b"\n")
                text, questions = f"{text}\n", questions + 1
            if questions > 9:
                process.kill()
            continue
        try:
            text += os.read(ours, 4096).decode(errors="replace")
        except OSError:  # how Linux reports that the other end is closed
            break
    os.close(ours)
    if process.wait():
        raise SystemExit(f"pipeline {' '.join(words)}:\n{text}")
    return text, questions


def ran(folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "soa_pipeline", *words]
    return subprocess.run(command, cwd=folder, env=_OURS, capture_output=True, text=True)


def shown(name: str, work: Path, engines: list[str]) -> list[str]:
    """All steps for one model: a line of the table. Raises SystemExit where a step fails."""
    only = [word for engine in engines for word in ("--engine", engine)]
    folder = work / name
    folder.mkdir(parents=True)
    show, seconds = SHOWS[name](folder), list[float]()
    where = ["--registry", f"sqlite:///{folder}/registry/registry.db"]

    def step(words: list[str]) -> str:
        begun = time.perf_counter()
        done = ran(folder, *words)
        seconds.append(time.perf_counter() - begun)
        if done.returncode:
            raise SystemExit(f"{name}: pipeline {' '.join(words)}:\n{done.stderr}")
        return done.stdout

    if show.told:
        typed(folder, "init", *show.told[1], *only)
        refused = ran(folder, "run", "config.yaml", *where)
        line = refused.stderr.strip().splitlines()[-1]
        if not refused.returncode or show.told[0] not in line:
            raise SystemExit(f"{name}: was to be told {show.told[0]}, and was told: {line}")
        print(f"{name} was told: {line}", flush=True)
    begun = time.perf_counter()
    _, questions = typed(folder, "init", *show.words, *only, *["--force"] * bool(show.told))
    seconds.append(time.perf_counter() - begun)
    answer = json.loads(step(["run", "config.yaml", *where, "--json"]))
    step(["promote", answer["version"], "--to", "production", *where])
    import pipeline

    expected, registered = show.expected(), answer["version"].partition("/")[0]
    begun = time.perf_counter()
    session = pipeline.load(f"{registered}@production", registry=where[1])
    n, most = len(expected), session.signature.ranges["n"].max
    out, copied = session.collection("outputs", n), 0
    for start in range(0, n, most):  # at most as many rows as it is built for
        stop = min(start + most, n)
        given = show.given(session, slice(start, stop))
        session.bind(given, out.window(start, stop))()
        copied += sum(len(collection.copied) for collection in given.values())
    seconds.append(time.perf_counter() - begun)
    found = np.stack([out[column.name] for column in out.layout.columns], axis=1)
    far = float(np.abs(found - expected).max())
    engine = session.origin.engine if session.origin else ""
    cells = [name, str(questions), *(f"{each:.1f}" for each in seconds), engine]
    return [*cells, f"{len(expected)}", f"{far:.1e}", f"{np.abs(expected).max():.2g}", str(copied)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(SHOWS)}")
    parser.add_argument("--work", type=Path, help="keep the folders here")
    parser.add_argument("--engine", action="append", default=[], help="only this one; repeated")
    options = parser.parse_args()
    if unknown := {*options.names} - {*SHOWS}:
        parser.error(f"{unknown.pop()}: one of {', '.join(SHOWS)}")
    head = [
        "model",
        "questions",
        "init",
        "run",
        "promote",
        "bind",
        "engine",
        "rows",
        "furthest",
        "largest",
        "copied",
    ]
    table = [head]
    with tempfile.TemporaryDirectory(prefix="first-model-") as temporary:
        for name in options.names or SHOWS:
            table.append(shown(name, options.work or Path(temporary), options.engine))
            print(" ".join(table[-1]), flush=True)
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for line in table:
        print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)))
    print("seconds; furthest: |ours - the library's|; largest: |the library's|")


if __name__ == "__main__":
    main()
