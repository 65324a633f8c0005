"""Some networks of benchmarks/speed/unseen.py, written for JAX: from columns to columns.

JAX takes part if it can be imported (`pip install jax`). XLA compiles a network for each size. Its
settings do not keep it to one thread, so whoever times it keeps the process on one core.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch

from soa import Signature
from stages.reference import Arrays, Case, filled_collections

Weights = Mapping[str, Any]
"""By its name in the torch model: a weight as an array of JAX."""


def in_jax(
    network: str, model: torch.nn.Module, signature: Signature, inputs: Arrays, case: Case
) -> Callable[[], object] | None:
    """A call of a network on the reference's columns, which JAX aliases. It makes the columns of
    the answers. None without JAX, and for a network that is not written here."""
    function = _NETWORKS.get(network)
    if function is None or importlib.util.find_spec("jax") is None:
        return None
    os.environ |= {"JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
    jax = import_module("jax")
    (bound,) = signature.inputs
    collections, _ = filled_collections(signature, inputs, case, torch.device("cpu"))
    collection = collections[bound.block.collection]
    tensors = [collection.tensor(name) for name in bound.block.columns]
    columns = [jax.dlpack.from_dlpack(tensor) for tensor in tensors]
    weights = {name: jax.numpy.asarray(each.numpy()) for name, each in model.state_dict().items()}

    def from_columns(columns: Sequence[Any]) -> Any:
        rows = jax.numpy.stack(columns, axis=1)
        return jax.numpy.unstack(function(jax, weights, rows), axis=1)

    compiled = jax.jit(from_columns)
    expected = model(torch.stack(tensors, dim=1))
    answers = torch.stack([torch.utils.dlpack.from_dlpack(c) for c in compiled(columns)], dim=1)
    torch.testing.assert_close(answers, expected, rtol=1e-3, atol=1e-4)
    return lambda: jax.block_until_ready(compiled(columns))


def _linear(weights: Weights, name: str, x: Any) -> Any:
    return x @ weights[f"{name}.weight"].T + weights[f"{name}.bias"]


def _batch_norm(jax: Any, weights: Weights, name: str, x: Any, axis: int = -1) -> Any:
    """torch's BatchNorm in inference; the channels are on `axis`."""
    shape = [1] * x.ndim
    shape[axis] = -1
    mean, variance, scale, shift = (
        weights[f"{name}.{each}"].reshape(shape)
        for each in ("running_mean", "running_var", "weight", "bias")
    )
    return (x - mean) / jax.numpy.sqrt(variance + 1e-5) * scale + shift


def _layer_norm(jax: Any, weights: Weights, name: str, x: Any) -> Any:
    """torch's LayerNorm over the last axis."""
    centred = x - x.mean(-1, keepdims=True)
    normal = centred / jax.numpy.sqrt((centred * centred).mean(-1, keepdims=True) + 1e-5)
    return normal * weights[f"{name}.weight"] + weights[f"{name}.bias"]


def _mlp(jax: Any, weights: Weights, x: Any) -> Any:
    """Linear layers with a ReLU between them; their names sort in their order."""
    layers = sorted({name.rpartition(".")[0] for name in weights})
    for layer in layers[:-1]:
        x = jax.nn.relu(_linear(weights, layer, x))
    return _linear(weights, layers[-1], x)


def _line_segments(jax: Any, weights: Weights, x: Any) -> Any:
    return jax.nn.softmax(_mlp(jax, weights, x), axis=-1)


def _pointwise_first(jax: Any, weights: Weights, x: Any) -> Any:
    hidden = jax.nn.relu(_linear(weights, "first", jax.numpy.log1p(jax.numpy.abs(x))))
    return jax.nn.softmax(_linear(weights, "last", hidden), axis=-1)


def _transformer_block(jax: Any, weights: Weights, x: Any) -> Any:
    h = _linear(weights, "embed", x.reshape(-1, 16, 5))
    qkv = _linear(weights, "qkv", _layer_norm(jax, weights, "first", h))
    q, k, v = qkv.reshape(-1, 16, 3, 4, 8).transpose(2, 0, 3, 1, 4)
    attended = jax.nn.softmax(q @ k.swapaxes(-1, -2) / 8**0.5, axis=-1) @ v
    h = h + _linear(weights, "out", attended.swapaxes(1, 2).reshape(-1, 16, 32))
    wide = _linear(weights, "wide", _layer_norm(jax, weights, "second", h))
    h = h + _linear(weights, "narrow", jax.nn.gelu(wide, approximate=False))
    return _linear(weights, "classify", h.mean(1))


def _small_resnet(jax: Any, weights: Weights, x: Any) -> Any:
    def convolved(x: Any, layers: str, conv: int) -> Any:
        weight, bias = (weights[f"{layers}.{conv}.{each}"] for each in ("weight", "bias"))
        y = jax.lax.conv(x, weight, (1, 1), "SAME") + bias[:, None, None]
        return _batch_norm(jax, weights, f"{layers}.{conv + 1}", y, axis=1)

    h = jax.nn.relu(convolved(x.reshape(-1, 3, 8, 8), "stem", 0))
    for block in ("blocks.0", "blocks.1"):
        h = jax.nn.relu(h + convolved(jax.nn.relu(convolved(h, block, 0)), block, 3))
    return _linear(weights, "classify", h.mean((2, 3)))


def _edge_conv(jax: Any, weights: Weights, x: Any) -> Any:
    points = x.reshape(-1, 16, 3)
    apart = points[:, :, None, :2] - points[:, None, :, :2]
    _, near = jax.lax.top_k(-jax.numpy.sqrt((apart * apart).sum(-1)), 5)  # the nearest is itself
    rows = jax.numpy.arange(len(points))[:, None, None]
    others = points[rows, near[..., 1:]]
    own = jax.numpy.broadcast_to(points[:, :, None], others.shape)
    edges = jax.numpy.concatenate([own, others - own], -1)
    hidden = jax.nn.relu(_linear(weights, "edge.0", edges))
    hidden = jax.nn.relu(_linear(weights, "edge.2", hidden))
    return _linear(weights, "classify", hidden.max(2).mean(1))


def _track_purity(jax: Any, weights: Weights, x: Any) -> Any:
    for k in range(0, 12, 3):  # layer k, its batch norm, and an ELU without weights
        y = _linear(weights, f"wide.{k}", x)
        x = jax.nn.elu(_batch_norm(jax, weights, f"wide.{k + 1}", y))
    h = _linear(weights, "narrow", x)
    for block in ("blocks.0", "blocks.1", "blocks.2"):
        y = _linear(weights, f"{block}.0", h)
        h = h + jax.nn.elu(_batch_norm(jax, weights, f"{block}.1", y))
    return jax.nn.sigmoid(_linear(weights, "classify", h))


_NETWORKS: Mapping[str, Callable[[Any, Weights, Any], Any]] = {
    "pointwise_first": _pointwise_first,
    "transformer_block": _transformer_block,
    "small_resnet": _small_resnet,
    "edge_conv": _edge_conv,
    "track_purity": _track_purity,
    "line_segments": _line_segments,
    "mlp_256": _mlp,
}
"""By the name of a network in unseen.py: the same network, as a function of JAX, weights, rows."""
