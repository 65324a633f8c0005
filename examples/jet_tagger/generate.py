"""Toy jets from a very simple parton shower, with the shapes that a tagger must distinguish.

QCD jets are one parton with soft, collinear emissions; W jets are two prongs of mass 80 GeV; top
jets are three prongs of mass 173 GeV. Every prong fragments with a transverse momentum of about
half a GeV, and soft radiation covers the cone. This is not realistic physics, but it needs only
numpy and a second.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
import numpy.typing as npt

Floats: TypeAlias = npt.NDArray[np.float64]
Columns: TypeAlias = dict[str, npt.NDArray[np.generic]]

CLASSES = ("qcd", "w", "top")
CONE = 0.8
_FRAGMENTS = 36  # at most, per prong
_SOFT = 24  # at most, per jet


def jets(
    n: int, seed: int, particles: int = 16
) -> tuple[dict[str, npt.NDArray[np.float32]], npt.NDArray[np.int64]]:
    """Return (columns, labels) of n jets, a third of each class in random order.

    Columns, float32: pt, eta, phi, mass, energy (n,); part_pt, part_energy, part_deta, part_dphi
    (n, particles), in decreasing pt, zero after the last particle. Units: GeV. The part_ angles are
    relative to the jet axis.
    """
    rng = np.random.default_rng(seed)
    labels = rng.integers(0, len(CLASSES), n)
    pt = 350.0 * (1.0 - 0.9 * rng.random(n)) ** -0.35
    eta = np.clip(rng.normal(0.0, 1.0, n), -2.2, 2.2)
    phi = rng.uniform(-np.pi, np.pi, n)

    prongs = np.zeros((n, 3, 3))  # jet, prong, (pt, eta, phi)
    for number, shower in enumerate((_qcd, _w, _top)):
        rows = np.flatnonzero(labels == number)
        prongs[rows] = shower(rng, pt[rows], eta[rows], phi[rows])
    radiation = np.concatenate([_fragment(rng, prongs), _soft(rng, eta, phi)], axis=1)
    return _cluster(radiation, particles), labels


def reference(rows: dict[str, int], seed: int) -> dict[str, Columns]:
    """Inputs of `configs/demo.yaml`; every 16th jet keeps 0 to 7 particles, fewer than the graph
    has neighbours."""
    n = rows["n"]
    columns, _ = jets(n, seed)
    left = np.random.default_rng(seed + 1).integers(0, 8, n)
    dropped = (np.arange(n) % 16 == 7)[:, None] & (np.arange(16) >= left[:, None])
    for name in ("part_pt", "part_energy", "part_deta", "part_dphi"):
        columns[name][dropped] = 0.0
    del columns["energy"]
    return {"jets": {name: values for name, values in columns.items()}}


def _momenta(pt: Floats, eta: Floats, phi: Floats) -> Floats:
    """Massless four-momenta (..., 4) as (px, py, pz, E)."""
    return np.stack([pt * np.cos(phi), pt * np.sin(phi), pt * np.sinh(eta), pt * np.cosh(eta)], -1)


def _angles(p: Floats) -> Floats:
    """(..., 4) -> (..., 3) as (pt, eta, phi)."""
    pt = np.hypot(p[..., 0], p[..., 1])
    return np.stack([pt, np.arcsinh(p[..., 2] / pt), np.arctan2(p[..., 1], p[..., 0])], -1)


def _wrap(phi: Floats) -> Floats:
    """The same angles, from -pi to pi."""
    return (phi + np.pi) % (2.0 * np.pi) - np.pi


def _massive(pt: Floats, eta: Floats, phi: Floats, mass: Floats) -> Floats:
    """Four-momenta (..., 4) of particles with a mass; `eta` and `phi` are their directions."""
    p = _momenta(pt, eta, phi)
    p[..., 3] = np.sqrt(p[..., 3] ** 2 + mass**2)
    return p


def _decay(
    rng: np.random.Generator, parent: Floats, first: Floats | float, second: Floats | float = 0.0
) -> tuple[Floats, Floats]:
    """Isotropic two-body decay of (n, 4) into products of the masses `first` and `second`."""
    m = np.sqrt(parent[:, 3] ** 2 - (parent[:, :3] ** 2).sum(1))
    q = np.sqrt((m**2 - (first + second) ** 2) * (m**2 - (first - second) ** 2)) / (2.0 * m)
    cos, azimuth = rng.uniform(-1.0, 1.0, len(m)), rng.uniform(-np.pi, np.pi, len(m))
    sin = np.sqrt(1.0 - cos**2)
    axis = np.stack([sin * np.cos(azimuth), sin * np.sin(azimuth), cos], 1)
    momentum, energy = q[:, None] * axis, np.sqrt(q**2 + first**2)
    # Boost along the parent's velocity; u = gamma * beta.
    u, gamma = parent[:, :3] / m[:, None], parent[:, 3] / m
    along = (u * momentum).sum(1)
    boosted = momentum + u * (along / (gamma + 1.0) + energy)[:, None]
    product = np.concatenate([boosted, (gamma * energy + along)[:, None]], 1)
    return product, parent - product


def _qcd(rng: np.random.Generator, pt: Floats, eta: Floats, phi: Floats) -> Floats:
    """Two emissions, the second at the smaller angle: 1/z in momentum, 1/theta in angle. Prongs
    (n, 3, 3): what is left of the parton, and the emissions."""
    n = len(pt)
    hard = np.stack([pt, eta, phi], 1)
    out = np.zeros((n, 3, 3))
    theta = 0.9 * 45.0 ** -rng.random(n)
    for emission in (1, 2):
        z = 0.5 * 25.0 ** -rng.random(n)
        turn = rng.uniform(-np.pi, np.pi, n)
        step = theta[:, None] * np.stack([np.cos(turn), np.sin(turn)], 1)
        out[:, emission, 0] = z * hard[:, 0]
        out[:, emission, 1:] = hard[:, 1:] + (1.0 - z)[:, None] * step
        hard[:, 0] *= 1.0 - z
        hard[:, 1:] -= z[:, None] * step
        theta = theta * rng.random(n)
    out[:, 0] = hard
    return out


def _w(rng: np.random.Generator, pt: Floats, eta: Floats, phi: Floats) -> Floats:
    """The two quarks of a W boson: prongs (n, 3, 3), the third without momentum."""
    mass = rng.normal(80.4, 2.1, len(pt))
    quark, other = _decay(rng, _massive(pt, eta, phi, mass), 0.0)
    out = np.zeros((len(pt), 3, 3))
    out[:, 0], out[:, 1] = _angles(quark), _angles(other)
    return out


def _top(rng: np.random.Generator, pt: Floats, eta: Floats, phi: Floats) -> Floats:
    """The b quark of a top quark and the two of its W boson: prongs (n, 3, 3)."""
    mass, w_mass = rng.normal(172.6, 1.4, len(pt)), rng.normal(80.4, 2.1, len(pt))
    w, b = _decay(rng, _massive(pt, eta, phi, mass), w_mass)
    quark, other = _decay(rng, w, 0.0)
    return np.stack([_angles(b), _angles(quark), _angles(other)], 1)


def _fragment(rng: np.random.Generator, prongs: Floats) -> Floats:
    """(n, 3, 3) prongs -> (n, 3 * _FRAGMENTS, 3) particles (pt, eta, phi); pt = 0 where unused."""
    n = len(prongs)
    shape = (n, 3, _FRAGMENTS)
    pt = prongs[:, :, :1]
    count = 1 + rng.poisson(2.4 * np.log1p(pt))
    share = rng.exponential(1.0, shape) ** 1.6 * (np.arange(_FRAGMENTS) < count)
    energy = pt * share / share.sum(2, keepdims=True)
    # The transverse momentum relative to the prong is half a GeV: harder particles are closer.
    angle = np.minimum(rng.rayleigh(0.5, shape) / np.maximum(energy, 0.1), 0.6)
    turn = rng.uniform(-np.pi, np.pi, shape)
    eta = prongs[:, :, 1:2] + angle * np.cos(turn)
    phi = prongs[:, :, 2:3] + angle * np.sin(turn)
    return np.stack([energy, eta, phi], -1).reshape(n, 3 * _FRAGMENTS, 3)


def _soft(rng: np.random.Generator, eta: Floats, phi: Floats) -> Floats:
    """Soft radiation, uniform over the cone: (n, _SOFT, 3)."""
    shape = (len(eta), _SOFT)
    used = np.arange(_SOFT) < rng.poisson(8.0, len(eta))[:, None]
    pt = (0.4 + rng.exponential(0.9, shape)) * used
    radius, turn = CONE * np.sqrt(rng.random(shape)), rng.uniform(-np.pi, np.pi, shape)
    return np.stack(
        [pt, eta[:, None] + radius * np.cos(turn), phi[:, None] + radius * np.sin(turn)], -1
    )


def _cluster(radiation: Floats, particles: int) -> dict[str, npt.NDArray[np.float32]]:
    """Sum (n, m, 3) particles into jets; keep those in the cone, the hardest first. Those below a
    quarter of a GeV are not seen."""
    pt, eta, phi = radiation[..., 0], radiation[..., 1], radiation[..., 2]
    pt = pt * (pt > 0.25)
    for _ in range(2):  # removing particles outside the cone moves the axis
        total = _momenta(pt, eta, phi).sum(1)
        axis = _angles(total)
        deta, dphi = eta - axis[:, 1:2], _wrap(phi - axis[:, 2:3])
        pt = pt * (np.hypot(deta, dphi) < CONE)
    total = _momenta(pt, eta, phi).sum(1)
    axis = _angles(total)
    deta, dphi = eta - axis[:, 1:2], _wrap(phi - axis[:, 2:3])

    order = np.argsort(-pt, axis=1, kind="stable")[:, :particles]
    by_pt = np.take_along_axis(pt, order, 1)
    present = by_pt > 0
    mass2 = total[:, 3] ** 2 - (total[:, :3] ** 2).sum(1)
    columns = {
        "pt": axis[:, 0],
        "eta": axis[:, 1],
        "phi": axis[:, 2],
        "mass": np.sqrt(np.maximum(mass2, 0.0)),
        "energy": total[:, 3],
        "part_pt": by_pt,
        "part_energy": by_pt * np.cosh(np.take_along_axis(eta, order, 1)),
        "part_deta": np.take_along_axis(deta, order, 1) * present,
        "part_dphi": np.take_along_axis(dphi, order, 1) * present,
    }
    return {name: values.astype(np.float32) for name, values in columns.items()}
