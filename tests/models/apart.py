"""Small models whose rows depend on each other, each in one way, and similar independent ones.

A function gets the layers below and rows `(n, 6)`, and gives something for each row.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH = 6
Function = Callable[["Layers", Tensor], Tensor]


class Layers(nn.Module):
    """The layers that the functions use; `forward` gives one number per row for each function."""

    table: Tensor
    near: Tensor

    def __init__(self, functions: dict[str, Function]) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.lstm = nn.LSTM(3, 4, batch_first=True)
            self.gru = nn.GRU(3, 4, 2, batch_first=True, bidirectional=True)
            self.steps = nn.LSTM(WIDTH, 4)
            self.attention = nn.MultiheadAttention(WIDTH, 2, batch_first=True)
            self.encoder = nn.TransformerEncoderLayer(WIDTH, 2, 8, batch_first=True)
            self.embedding = nn.Embedding(10, WIDTH)
            self.batch_norm = nn.BatchNorm1d(WIDTH)
            self.group_norm = nn.GroupNorm(2, WIDTH)
            self.along = nn.Conv1d(WIDTH, WIDTH, 3, padding=1)
            self.within = nn.Conv1d(2, 4, 2)
            self.image = nn.Conv2d(1, 4, 2)
            self.register_buffer("table", torch.randn(10_000, WIDTH))
            self.register_buffer("near", torch.tensor([[1, 2], [0, 2], [0, 1]]))
        self.functions = functions

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        return tuple(answer(self, function, x) for function in self.functions.values())


def answer(layers: Layers, function: Function, x: Tensor) -> Tensor:
    """One number for each row."""
    y = function(layers, x)
    y = y if y.is_floating_point() else y.float()
    return y.flatten(1).sum(1) if y.dim() > 1 else y


def points(x: Tensor) -> Tensor:
    """(n, 2, 3)"""
    return x.view(-1, 2, 3)


DEPENDENT: dict[str, Function] = dict(
    # sums, means and other statistics
    sum_of_rows=lambda m, x: x - x.sum(0),
    sum_of_everything=lambda m, x: x / (1 + x.square().sum()),
    mean=lambda m, x: x - x.mean(0, keepdim=True),
    rare_maximum=lambda m, x: x - x.amax(0).clamp(min=3),
    standard_deviation=lambda m, x: x / (x.std(0) + 1),
    mean_and_variance=lambda m, x: torch.var_mean(x, 0)[1] * x,
    norm=lambda m, x: x / x.norm(dim=0),
    normalize=lambda m, x: F.normalize(x, dim=0),
    logsumexp=lambda m, x: x - x.logsumexp(0),
    any_row=lambda m, x: x * (x > 3).any(0),
    all_rows=lambda m, x: x * (x < 3).all(),
    number_above=lambda m, x: x * (x > 0).count_nonzero(0),
    median=lambda m, x: x - x.median(0).values,
    quantile=lambda m, x: x - x.quantile(0.3, dim=0),
    place_of_largest=lambda m, x: x + x.argmax(0),
    # cumulative and sorting operations along the rows
    softmax=lambda m, x: x.softmax(0),
    log_softmax=lambda m, x: x.log_softmax(0),
    running_sum=lambda m, x: x.cumsum(0),
    running_product=lambda m, x: x.tanh().cumprod(0),
    running_maximum=lambda m, x: x.cummax(0).values,
    sort=lambda m, x: x.sort(0).values,
    rank=lambda m, x: x.argsort(0),
    difference=lambda m, x: torch.diff(x, dim=0, prepend=x.new_zeros(1, WIDTH)),
    fourier=lambda m, x: torch.fft.fft(x, dim=0).real,
    # rows that are picked by their position
    flipped=lambda m, x: x.flip(0),
    rolled=lambda m, x: x.roll(1, 0),
    rolled_flat=lambda m, x: x.roll(1),
    first=lambda m, x: x + x[:1],
    last=lambda m, x: x + x[-1],
    one_by_one=lambda m, x: torch.cat([x[1:], x[:1]]),
    shifted=lambda m, x: F.pad(x, (0, 0, 1, 0))[:-1],
    repeated_twice=lambda m, x: x.repeat(2, 1).view(-1, 2, WIDTH)[:, 0],
    each_twice=lambda m, x: x.repeat_interleave(2, 0).view(2, -1, WIDTH)[1],
    transposed_and_cut=lambda m, x: x.t().reshape(-1, WIDTH),
    columns_of_all=lambda m, x: x.t().reshape(-1, 2, 3).view(-1, WIDTH),
    strided=lambda m, x: torch.as_strided(x.contiguous(), (x.shape[0], 1), (1, 1)),
    lower_triangle=lambda m, x: x.tril(),
    picked=lambda m, x: x[(x[:, 0] > 0).long()],
    next_row=lambda m, x: x[(torch.arange(x.shape[0]) + 1) % x.shape[0]],
    from_the_end=lambda m, x: x[x.shape[0] - 1 - torch.arange(x.shape[0])],
    row_named_by_a_value=lambda m, x: x[x[:, 0].abs().long().clamp(max=0)],
    gathered=lambda m, x: x.gather(0, (x > 0).long()),
    selected=lambda m, x: x.index_select(0, (x[:, 0] > 0).long()),
    embedded=lambda m, x: F.embedding((x[:, 0] > 0).long(), x),
    beyond_its_row=lambda m, x: F.pad(x.reshape(-1), (0, 1))[torch.arange(x.shape[0]) * 6 + 6],
    # writes into other rows
    scattered=lambda m, x: torch.zeros_like(x).scatter(0, (x > 0).long(), x),
    summed_by_index=lambda m, x: torch.zeros_like(x).index_add(0, (x[:, 0] > 0).long(), x),
    bins=lambda m, x: x + x.new_zeros(3).scatter_add(0, x[:, 0].abs().long() % 3, x[:, 0])[0],
    put=lambda m, x: x.index_put(((x[:, 0] > 0).long(),), x),
    # products of rows with rows
    gram=lambda m, x: (x @ x.t()) @ x,
    outer=lambda m, x: torch.einsum("ni,mi->nm", x, x).tanh().sum(1),
    as_weights=lambda m, x: F.linear(x, x).sum(1),
    covariance=lambda m, x: x @ torch.einsum("ni,nj->ij", x, x),
    distances=lambda m, x: torch.cdist(x, x, 1.0).sum(1),
    attention_over_rows=lambda m, x: F.scaled_dot_product_attention(x[None], x[None], x[None])[0],
    unbatched_attention=lambda m, x: m.attention(x, x, x)[0],
    unbatched_transformer=lambda m, x: m.encoder(x[None])[0, :, 0],
    convolved_rows=lambda m, x: m.along(x.t()[None])[0].t(),
    unbatched_convolution=lambda m, x: m.along(x.t()).t(),
    pooled_rows=lambda m, x: F.avg_pool1d(x.t()[None], 3, 1, 1)[0].t(),
    pooled_rows_of_images=lambda m, x: F.max_pool2d(x[None, None], 3, 1, 1)[0, 0],
    batch_norm_of_training=lambda m, x: F.batch_norm(x, None, None, training=True),
    layer_norm_of_rows=lambda m, x: F.layer_norm(x.t(), [x.shape[0]]).t(),
    weight_norm_of_rows=lambda m, x: torch._weight_norm(x, m.table[:1], 1),
    instance_norm_of_rows=lambda m, x: F.instance_norm(x.t()[None])[0].t(),
    limits_of_other_rows=lambda m, x: torch.bucketize(x[:, 0].contiguous(), x[:, 1].sort().values),
    # the number of rows, and the number of a row
    number_of_rows=lambda m, x: x * x.shape[0],
    rare_number_of_rows=lambda m, x: m.linear(x) * (1 + x.shape[0] // 5001),
    root_of_rows=lambda m, x: x / (x.shape[0] + 1) ** 0.5,
    filled_with_rows=lambda m, x: x + torch.full((x.shape[0], 1), x.shape[0]),
    many_or_few=lambda m, x: x * (torch.scalar_tensor(x.shape[0]) > 50),
    row_number=lambda m, x: x + torch.arange(x.shape[0])[:, None],
    first_rows_only=lambda m, x: torch.where(torch.arange(x.shape[0])[:, None] < 3, x, 0),
    even_and_odd=lambda m, x: x * (torch.arange(x.shape[0]) % 2)[:, None],
    as_far_as_rows=lambda m, x: x + torch.linspace(0, x.shape[0], WIDTH),
    position=lambda m, x: x + m.table[: x.shape[0]],
    position_by_index=lambda m, x: x + m.table[torch.arange(x.shape[0])],
    position_embedded=lambda m, x: x + F.embedding(torch.arange(x.shape[0]), m.table),
    diagonal_matrix=lambda m, x: torch.eye(x.shape[0]) @ x - torch.eye(x.shape[0])[:, :1],
    written_number=lambda m, x: x.select_scatter(torch.arange(x.shape[0]).float(), 1, 0),
    # random numbers, unknown operators and branches
    noise=lambda m, x: x + torch.rand_like(x),
    dropout=lambda m, x: F.dropout(x, 0.5, training=True),
    unknown=lambda m, x: torch.renorm(x, 2, 1, 1.0),
    branch=lambda m, x: torch.cond(x.sum() > 0, lambda x: x + 1, lambda x: x - 1, (x,)),
)

INDEPENDENT: dict[str, Function] = dict(
    pointwise=lambda m, x: F.gelu(x).exp() + F.hardswish(x) * x.sigmoid() - torch.atan2(x, x + 1),
    conditions=lambda m, x: torch.where((x > 0) & (x < 1), x, x.square()).masked_fill(x < -1, 2),
    sums=lambda m, x: x - x.sum(1, keepdim=True) + points(x).mean((1, 2))[:, None],
    statistics=lambda m, x: torch.var_mean(x, 1)[0] + x.std(1) + x.norm(dim=1) + x.logsumexp(1),
    order_within=lambda m, x: x.sort(1).values.cumsum(1).cummax(1).values + x.argmax(1)[:, None],
    middle=lambda m, x: x.median(1).values + x.quantile(0.5, dim=1) + x.amax(-1) + x.max(1).values,
    softmax_within=lambda m, x: x.softmax(1) + x.log_softmax(-1) + x.flip(1) + x.roll(1, 1),
    parts=lambda m, x: torch.cat([x[:, 3:], x[:, :3].neg()], 1) + torch.stack([x[:, 1]] * 6, 1),
    chunks=lambda m, x: torch.cat(x.chunk(2, 1)[::-1], 1) * x.split([2, 4], 1)[0].sum(1, True),
    taken_apart=lambda m, x: x.unbind(1)[2] - x.unbind(1)[0],
    shapes=lambda m, x: points(x).permute(2, 0, 1).unsqueeze(1).squeeze(1).movedim(1, 0),
    padded=lambda m, x: F.pad(points(x), (1, 1), mode="reflect") + F.pad(points(x), (2, 0)),
    windows=lambda m, x: x.unfold(1, 3, 1).sum(2) + points(x).diagonal(dim1=1, dim2=2).sum(1, True),
    assigned=lambda m, x: _assigned(x),
    assigned_by_masks=lambda m, x: _assigned_by_masks(x),
    weight_norm_of_each=lambda m, x: torch._weight_norm(x, x[:, :1].abs(), 0),
    triangular=lambda m, x: torch.linalg.solve_triangular(
        torch.linalg.cholesky(points(x).mT @ points(x) + torch.eye(3)), points(x).mT, upper=False
    ),
    alike=lambda m, x: sum(torch.broadcast_tensors(x[:, :1], m.table[:1])),
    repeated=lambda m, x: x.repeat_interleave(3, 0).view(-1, 3, 6)[:, 1] + x.repeat(1, 2)[:, :6],
    outermost=lambda m, x: x.repeat(2, 1).view(2, -1, WIDTH)[0],
    all_particles=lambda m, x: (
        F.relu(m.linear.weight[:, :3] @ x.reshape(-1, 3).t()).view(WIDTH, -1, 2).transpose(0, 1)
    ),
    constant_rows=lambda m, x: x + torch.ones(x.shape[0], 1) + m.table[0].expand(x.shape[0], -1),
    linear=lambda m, x: m.linear(x) + F.linear(points(x), m.linear.weight[:, :3])[:, 1],
    products=lambda m, x: (
        points(x) @ points(x).mT @ points(x)
        + torch.baddbmm(points(x), points(x) @ points(x).mT, points(x))
    ),
    columns_times=lambda m, x: (m.linear.weight @ x.t()).t() + x.addmm(x, m.table[:6]),
    einsum=lambda m, x: torch.einsum("nij,nkj->nik", points(x), points(x)),
    einsum_with_weights=lambda m, x: torch.einsum(
        "nij,kj->kin", points(x), m.linear.weight[:, :3]
    ).permute(2, 0, 1),
    outer_of_each=lambda m, x: torch.linalg.det(x[:, :2, None] @ x[:, None, 2:4] + torch.eye(2)),
    distances_within=lambda m, x: torch.cdist(points(x), points(x)),
    similarity=lambda m, x: F.cosine_similarity(points(x), points(x).flip(1), dim=-1),
    lstm=lambda m, x: m.lstm(points(x))[0],
    gru=lambda m, x: m.gru(points(x))[0],
    steps_first=lambda m, x: m.steps(x[None])[0][0],
    attention=lambda m, x: m.attention(*[x[:, None].expand(-1, 3, -1) * m.table[:3]] * 3)[0],
    transformer=lambda m, x: m.encoder(x[:, None] * m.table[:4]),
    convolution=lambda m, x: m.within(points(x)),
    image=lambda m, x: F.adaptive_avg_pool2d(F.max_pool2d(m.image(points(x)[:, None]), 1), 1),
    upsampled=lambda m, x: F.interpolate(points(x), scale_factor=2, mode="linear"),
    norms=lambda m, x: F.layer_norm(m.batch_norm(x), [6]) + m.group_norm(x) + F.rms_norm(x, [6]),
    embedding=lambda m, x: m.embedding(x.abs().long().clamp(max=9)),
    one_hot=lambda m, x: F.one_hot(x.abs().long().clamp(max=9), 10),
    buckets=lambda m, x: torch.bucketize(x, m.table[0].sort().values),
    gathered_within=lambda m, x: x.gather(1, x.argsort(1)),
    constant_index=lambda m, x: points(x)[:, :, m.near],
    scattered_within=lambda m, x: torch.zeros_like(x).scatter_add(1, x.argsort(1), x),
    own_row_by_number=lambda m, x: x[torch.arange(x.shape[0])[:, None], x.argsort(1)],
    neighbours_of_flat=lambda m, x: _neighbours(x),
    tree=lambda m, x: _tree(m, x),
    fourier_within=lambda m, x: torch.fft.rfft(x).abs(),
    turned_round=lambda m, x: torch.rot90(points(x), 1, (1, 2)).flatten(1) + torch.fliplr(x),
    vectorised=lambda m, x: torch.vmap(lambda row: row - row.mean())(x),
)


def _assigned_by_masks(x: Tensor) -> Tensor:
    """Writes into columns that constant masks pick, and where a condition holds."""
    y, third = x.clone(), torch.tensor([True, False, False] * 2)
    y[:, third] = x[:, 1:3] * x[:, 2:4]
    y[:, ~third & (torch.arange(6) < 3)] = 2.0
    y[x > 1] = 0.0
    z = points(x).clone()
    z[:, third[:2]] = 3.0
    return y + z.view(-1, 6)


def _assigned(x: Tensor) -> Tensor:
    """Writes into columns by their numbers, and where a condition holds."""
    y = x.clone()
    y[:, 0] = 0.0
    y[:, [2, 4]] = x[:, [4, 2]]
    y[y < -1] = -1.0
    return y


def _neighbours(x: Tensor) -> Tensor:
    """As in ParticleNet: the points of all rows lie side by side, and are picked by number."""
    pairs = points(x)
    n = pairs.shape[0]
    near = (-torch.cdist(pairs.mT, pairs.mT)).topk(2, dim=-1).indices  # (n, 3, 2)
    place = (near + torch.arange(n).view(-1, 1, 1) * 3).view(-1)
    flat = pairs.transpose(0, 1).reshape(2, -1)
    return flat[:, place].view(2, n, 3, 2).transpose(0, 1)


def _tree(m: Layers, x: Tensor) -> Tensor:
    """Walks down two levels of a tree, for each row alone."""
    at = m.near.new_zeros(1).expand(x.shape[0], -1)
    for _ in range(2):
        at = m.near.reshape(-1)[2 * at + (x.gather(1, at) < 0).long()]
    return m.table[at]
