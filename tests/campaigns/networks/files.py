"""Models whose rows lie in real files: trained networks, an ONNX file and decision trees."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from tests.campaigns.networks.cases import Array
from tests.campaigns.networks.walk import ROOT, Given, Owned, given_columns

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


def nanoaod(folder: Path) -> Owned:
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
    return Owned(words, _eager(model, rows), given_columns(columns))


def hzz(folder: Path) -> Owned:
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

    def given(session: Any, rows: slice) -> Given:
        found: Given = from_jagged(events[rows], session.signature, "Jet")
        return found | from_jagged(events[rows], session.signature, "Muon")

    words = [f"{ROOT}/examples/hzz/model.py:build", str(file), "--input", f"jets={','.join(jets)}"]
    words += ["--input", f"muons={','.join(muons)}", "--input", "muon_exists=mask", "--length", "5"]
    (x, exists), (y, others) = padded(jets, 1), padded(muons, 2)
    mask = exists[:, None].astype(np.float32)
    return Owned(words, _eager(build().eval(), x, mask, y, others), given)


def particlenet(folder: Path) -> Owned:
    """The trained ParticleNet of weaver, with its data config, on 128 particles."""
    from examples.nanoaod.data import locate
    from examples.particlenet.model import build

    columns, weights = _jets(folder), locate("ParticleNet_kin.pt")
    sizes: dict[str, Any] = {"input_dims": 7, "num_classes": 10, "fc_params": [[256, 0.1]]}
    sizes |= {"conv_params": [[16, [width] * 3] for width in (64, 128, 256)]}
    sizes |= {"use_fusion": False, "use_fts_bn": True, "use_counts": True, "for_inference": True}
    words = ["weaver.nn.model.ParticleNet:ParticleNet", "jets.npz", "--weights", str(weights)]
    words += ["--kwargs", json.dumps(sizes), "--weaver", "JetClass_kin.yaml"]
    expected = _eager(_loaded(build(), weights), *_rows(columns))
    return Owned(words, expected, given_columns(columns), near_ties=0.01)


def transformer(folder: Path) -> Owned:
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

    particles, jet = map(torch.from_numpy, _rows(columns))
    with torch.no_grad():  # as published, with trimming
        _, features, mask = ParticleNetOnColumns(model).prepare(particles, jet)
        names = ("part_px", "part_py", "part_pz", "part_energy")
        vectors = torch.stack([torch.from_numpy(columns[name]) for name in names], dim=1)
        expected = np.asarray(model(features, vectors * mask, mask))
    words = ["weaver.nn.model.ParticleTransformer:ParticleTransformer", "jets.npz"]
    words += ["--weights", "part.safetensors", "--weaver", "JetClass_kin.yaml"]
    words += ["--input", "x=pf_features", "--input", "v=pf_vectors", "--kwargs"]
    first, then = (json.dumps({**sizes, **more}) for more in ({}, {"trim": False}))
    told = ("trim: false", [*words, first])
    return Owned([*words, then], expected, given_columns(columns), told)


def onnx(folder: Path) -> Owned:
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

    session = onnxruntime.InferenceSession(file)
    found = session.run(None, {"particles": rows[0], "jet": rows[1]})  # the label too
    expected = np.concatenate([np.asarray(each).reshape(JETS, -1) for each in found], axis=1)
    return Owned(words, expected, given_columns(columns))


def xgboost(folder: Path) -> Owned:
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
    return Owned(words, booster.predict(rows)[:, None], given_columns(columns))


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


FILES: Mapping[str, Callable[[Path], Owned]] = {
    made.__name__: made for made in (nanoaod, hzz, particlenet, transformer, onnx, xgboost)
}
