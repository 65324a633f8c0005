"""The networks of the campaign: where each comes from, its data, and how it is called."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from tests.campaigns.networks import items, tabular

Array = npt.NDArray[Any]
Columns = Mapping[str, Array]
ROWS = 1500


@dataclass(frozen=True)
class Case:
    """A network and the file that its owner has.

    `made`: a function or class of this package. `columns` draws the file's columns. `inputs`: the
    tensors that forward gets, from the columns. `words` follow `pipeline init MODEL FILE`; they
    name no order of axes: `init` has to find it.
    """

    made: Callable[[], Any]
    columns: Callable[[np.random.Generator], Columns]
    inputs: Callable[[Columns], list[Array]]
    words: tuple[str, ...] = ()
    needs: tuple[str, ...] = ()


def _normal(*names: str, shape: tuple[int, ...] = ()) -> Callable[[Any], dict[str, Array]]:
    return lambda rng: {name: _floats(rng.normal(size=(ROWS, *shape))) for name in names}


def _floats(values: Any) -> Array:
    return np.asarray(values, np.float32)


def _numbered(prefix: str, count: int) -> list[str]:
    return [f"{prefix}{i}" for i in range(count)]


def _plain(made: Callable[[], Any], count: int, *needs: str) -> Case:
    """One input of plain columns v0, v1, …"""
    names = _numbered("v", count)
    return Case(made, _normal(*names), lambda c: [_side(c, names)], needs=needs)


def _side(columns: Columns, names: list[str]) -> Array:
    return np.stack([columns[name] for name in names], axis=-1)


def _items(made: Callable[[], Any], names: str, length: int, *, last: bool = True) -> Case:
    """One input of vectors of `length` items; forward gets (n, items, features) if `last`."""
    split = names.split()

    def given(columns: Columns) -> list[Array]:
        return [np.stack([columns[name] for name in split], axis=2 if last else 1)]

    return Case(made, _normal(*split, shape=(length,)), given)


def _momenta(rng: np.random.Generator, length: int) -> dict[str, Array]:
    """Massive particles: pt falls, and energies are consistent."""
    px, py, pz = (rng.normal(scale=20, size=(ROWS, length)) for _ in range(3))
    energy = np.sqrt(px**2 + py**2 + pz**2 + 0.14**2)
    return {
        n: _floats(v) for n, v in zip(("px", "py", "pz", "e"), (px, py, pz, energy), strict=True)
    }


def _existing(rng: np.random.Generator, length: int) -> Array:
    """A bool mask: the first few items of a row exist, at least one."""
    return np.arange(length) < rng.integers(1, length + 1, size=(ROWS, 1))


def _masked(made: Callable[[], Any], features: int, length: int) -> Case:
    """One file with x (n, items, features) and mask (n, items), as people store padded sets."""

    def columns(rng: np.random.Generator) -> Columns:
        mask = _existing(rng, length)
        x = rng.normal(size=(ROWS, length, features)) * mask[..., None]
        return {"x": _floats(x), "mask": mask}

    return Case(made, columns, lambda c: [c["x"], c["mask"]])


def _wide() -> Case:
    names = _numbered("v", 6)

    def columns(rng: np.random.Generator) -> Columns:
        found: dict[str, Array] = {name: _floats(rng.normal(size=ROWS)) for name in names}
        found["station"] = rng.integers(0, 12, ROWS)
        return found | {"charge": rng.integers(0, 3, ROWS)}

    return Case(
        tabular.WideAndDeep, columns,
        lambda c: [_side(c, names), c["station"], c["charge"]],
        ("--input", "x=" + ",".join(names)),
    )  # fmt: skip


def _conditional() -> Case:
    a, b = _numbered("f", 6), _numbered("c", 3)
    words = ("--input", "features=" + ",".join(a), "--input", "conditions=" + ",".join(b))
    return Case(tabular.Conditional, _normal(*a, *b), lambda c: [_side(c, a), _side(c, b)], words)


def _mixture() -> Case:
    names = _numbered("v", 5)
    return Case(
        tabular.MixtureDensity, _normal(*names, "target"),
        lambda c: [_side(c, names), c["target"]],
        ("--input", "x=" + ",".join(names)),
    )  # fmt: skip


def _calibration() -> Case:
    def columns(rng: np.random.Generator) -> Columns:
        pt = rng.exponential(40, ROWS) + 5
        return {"pt": _floats(pt), "eta": _floats(rng.uniform(-3, 3, ROWS))}

    return Case(tabular.Calibration, columns, lambda c: [c["pt"], c["eta"]])


def _particle_flow() -> Case:
    names = ["pt", "eta", "phi", "mass"]

    def columns(rng: np.random.Generator) -> Columns:
        mask = _existing(rng, 20)
        found = {n: _floats(rng.normal(size=(ROWS, 20)) * mask) for n in names[1:]}
        return {"pt": _floats(rng.exponential(10, (ROWS, 20)) * mask), **found}

    return Case(items.ParticleFlow, columns, lambda c: [np.stack([c[n] for n in names], 2)])


def _energy_flow() -> Case:
    def columns(rng: np.random.Generator) -> Columns:
        z = rng.exponential(size=(ROWS, 15))
        found = {"z": _floats(z / z.sum(1, keepdims=True))}
        return found | {n: _floats(rng.uniform(-1, 1, (ROWS, 15))) for n in ("dy", "dphi")}

    return Case(
        items.EnergyFlow, columns,
        lambda c: [c["z"], np.stack([c["dy"], c["dphi"]], 2)],
        ("--input", "p=dy,dphi"),
    )  # fmt: skip


def _lorentz(made: Callable[[], Any], order: str) -> Case:
    names = order.split()
    return Case(
        made, lambda rng: _momenta(rng, 10),
        lambda c: [np.stack([c[n] for n in names], 2)],
        ("--input", ("p=" if made is items.Lorentz else "four_vectors=") + ",".join(names)),
    )  # fmt: skip


def _edges() -> Case:
    names = ["eta", "phi", "pt"]
    return Case(
        items.EdgeConvolution, _normal(*names, shape=(12,)),
        lambda c: [np.stack([c[n] for n in names[:2]], 1), np.stack([c[n] for n in names], 1)],
        ("--input", "points=eta,phi", "--input", "features=eta,phi,pt"),
    )  # fmt: skip


def _flavour() -> Case:
    jet, inside = _numbered("jet", 5), _numbered("cand", 6)

    def columns(rng: np.random.Generator) -> Columns:
        found = {name: _floats(rng.normal(size=ROWS)) for name in jet}
        return found | {name: _floats(rng.normal(size=(ROWS, 10))) for name in inside}

    return Case(
        items.JetFlavour, columns,
        lambda c: [_side(c, jet), np.stack([c[n] for n in inside], 2)],
        ("--input", "globals_=" + ",".join(jet), "--input", "candidates=" + ",".join(inside)),
    )  # fmt: skip


def _graph() -> Case:
    def columns(rng: np.random.Generator) -> Columns:
        links = rng.random((ROWS, 8, 8)) < 0.4
        return {
            "x": _floats(rng.normal(size=(ROWS, 8, 3))),
            "adj": _floats(links | links.transpose(0, 2, 1)),
        }

    return Case(
        items.dense_graph, columns, lambda c: [c["x"], c["adj"]], needs=("torch_geometric",)
    )


def _image(made: Callable[[], Any], *shape: int, channel: bool = False) -> Case:
    """One column of images; with `channel`, forward wants an axis of 1 before rows and columns."""
    name = "x" if len(shape) == 3 else "image"

    def columns(rng: np.random.Generator) -> Columns:
        return {name: _floats(rng.exponential(size=(ROWS, *shape)))}

    return Case(made, columns, lambda c: [c[name][:, None] if channel else c[name]])


def _batch_second() -> Case:
    names = ["a", "b", "c"]
    return Case(
        items.BatchSecond, _normal(*names, shape=(10,)),
        lambda c: [np.stack([c[n] for n in names], 2).transpose(1, 0, 2)],
    )  # fmt: skip


def _fields() -> Case:
    def columns(rng: np.random.Generator) -> Columns:
        return {"fields": rng.integers(0, 60, (ROWS, 5))}

    return Case(items.Fields, columns, lambda c: [c["fields"]])


_ALL: tuple[Case, ...] = (
    _plain(tabular.Tagger, 16),
    _plain(tabular.rtdl_resnet, 12, "rtdl_revisiting_models"),
    _plain(tabular.rtdl_transformer, 8, "rtdl_revisiting_models"),
    _plain(tabular.tabm, 10, "tabm"),
    _wide(),
    _plain(tabular.SoftTrees, 10),
    _plain(tabular.Anomaly, 19),
    _plain(tabular.VariationalEncoder, 24),
    _plain(tabular.SelfNormalizing, 28),
    _plain(tabular.Experts, 8),
    _conditional(),
    _plain(tabular.Field, 3),
    _plain(tabular.Splines, 5),
    _plain(tabular.RadialBasis, 4),
    _plain(tabular.Quantiles, 9),
    _mixture(),
    _plain(tabular.Coupling, 6),
    _plain(tabular.zuko_spline, 4, "zuko"),
    _plain(tabular.nflows_autoregressive, 5, "nflows"),
    _calibration(),
    _plain(tabular.Positional, 2),
    _masked(items.DeepSets, 3, 30),
    _particle_flow(),
    _energy_flow(),
    _items(items.LongShort, "d0 z0 pt eta phi chi2", 15),
    _items(items.BothWays, "a b c d", 12),
    _batch_second(),
    _items(items.Causal, "a b c d", 20, last=False),
    Case(items.Wave, _normal("pulse", shape=(32,)), lambda c: [c["pulse"]]),
    _masked(items.Encoder, 4, 12),
    _items(items.SetTransformer, "a b c d", 14),
    _lorentz(items.Pairs, "px py pz e"),
    _edges(),
    _items(items.GravNet, "x y z t e", 16),
    _items(items.Interaction, "pt eta phi", 8, last=False),
    _flavour(),
    _lorentz(items.Lorentz, "e px py pz"),
    _items(items.Mixer, "pt eta phi", 16),
    _graph(),
    _image(items.Calorimeter, 12, 12, channel=True),
    _plain(items.Taus, 1452),
    _image(items.Residual, 3, 12, 12),
    _image(items.Segmentation, 16, 16),
    _fields(),
)
CASES = {case.made.__name__: case for case in _ALL}
