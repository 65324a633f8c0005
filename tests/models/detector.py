"""A model that uses every plan at once: two row dimensions, and every kind of block.

All its numbers are whole and small, so that every engine gives the same bits.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from soa import Block, Layout, RowRange, Signature, column, eigen, scalar

HITS = Layout(
    [
        column("a", "float32"),
        column("b", "float32"),
        column("c", "float32"),
        column("charge", "int8"),
        column("d", "float32"),
        eigen("dir", "float32", 3),
        eigen("cov", "float32", 2, 3),
        scalar("run", "uint32"),
        scalar("field", "float64"),
        eigen("track", "float64", 2),
        column("quality", "float32"),
    ]
)
ARROW = Layout([column("u", "float32"), eigen("w", "float32", 2, 2)], 64, "columns")
# Aligned to one element, so the padded length is the row count itself, also at n = 1.
PACKED = Layout([eigen("e", "float32", 1, 2), column("f", "float32")], 4)
PAIRS = Layout([column("i", "float32"), column("j", "float32")])
FOUND = Layout(
    [
        column("p", "float32"),
        column("q", "float32"),
        column("kind", "int32"),
        column("r", "float32"),
        eigen("pull", "float32", 3),
        eigen("fit", "float32", 2, 3),
        scalar("total", "float32"),
        scalar("rows", "float32"),
        column("s", "float32"),
        column("t", "float32"),
    ]
)
LOOSE = Layout([column("u", "float32"), eigen("w", "float32", 2, 2)], 64, "columns")
LINKS = Layout([column("score", "float32"), column("rank", "int64")])

INPUTS = [
    Block("in_order", "hits", ("a", "b", "c")),
    Block("permuted", "hits", ("c", "a", "b")),
    Block("scattered", "hits", ("d", "a")),
    Block("cast", "hits", ("quality", "charge"), "float32"),
    Block("vector", "hits", ("dir",)),
    Block("matrix", "hits", ("cov",)),
    Block("flattened", "hits", ("cov", "dir")),
    Block("reshaped", "hits", ("dir", "cov"), None, (3, 3)),
    Block("vector64", "hits", ("track",), "float32"),
    Block("scalars", "hits", ("field", "run"), "float32"),
    Block("separate", "arrow", ("w", "u")),
    Block("separate_matrix", "arrow", ("w",)),
    Block("packed_matrix", "packed", ("e",)),
    Block("packed", "packed", ("f", "e")),
    Block("pairs", "pairs", ("j", "i")),
]
OUTPUTS = [
    Block("out_permuted", "found", ("q", "p")),
    Block("out_scattered", "found", ("s", "r")),
    Block("out_kind", "found", ("kind",)),
    Block("out_vector", "found", ("pull",)),
    Block("out_matrix", "found", ("fit",)),
    Block("out_scalars", "found", ("rows", "total")),
    Block("out_reshaped", "loose", ("w", "u"), None, (5, 1)),
    Block("out_one", "found", ("t",)),
    Block("out_score", "links", ("score",)),
    Block("out_rank", "links", ("rank",)),
]


def signature() -> Signature:
    """Of all blocks; pairs and links have a row dimension of their own."""
    return Signature.build(
        {
            "hits": HITS,
            "arrow": ARROW,
            "packed": PACKED,
            "pairs": PAIRS,
            "found": FOUND,
            "loose": LOOSE,
            "links": LINKS,
        },
        INPUTS,
        OUTPUTS,
        {"n": RowRange(0, 100, (33,)), "m": RowRange(0, 70, (5, 64))},
        {"pairs": "m", "links": "m"},
    )


class Detector(nn.Module):
    """Rows are independent, except that `out_scalars` is the sum over all rows and their number."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer(
            "weights", (torch.arange(48 * 18) * 7 % 13 - 6).reshape(48, 18).float()
        )

    def forward(
        self,
        in_order: Tensor,
        permuted: Tensor,
        scattered: Tensor,
        cast: Tensor,
        vector: Tensor,
        matrix: Tensor,
        flattened: Tensor,
        reshaped: Tensor,
        vector64: Tensor,
        scalars: Tensor,
        separate: Tensor,
        separate_matrix: Tensor,
        packed_matrix: Tensor,
        packed: Tensor,
        pairs: Tensor,
    ) -> tuple[Tensor, ...]:
        row = torch.cat(
            [
                in_order,
                permuted * 2,
                scattered * 3,
                cast,
                vector * 5,
                (matrix @ matrix.transpose(1, 2)).flatten(1).remainder(17),
                flattened,
                torch.relu(reshaped).flatten(1),
                vector64,
                separate,
                (separate_matrix - separate_matrix.transpose(1, 2)).flatten(1)[:, 1:2],
                packed_matrix.flatten(1),
                packed,
            ],
            dim=1,
        )
        answers = row @ self.weights + scalars[0] - scalars[1]
        rank = pairs[:, 0].long() * 3 - pairs[:, 1].long()
        return (
            answers[:, 0:2],
            answers[:, 2:4],
            answers[:, 4:5].int(),
            answers[:, 5:8],
            answers[:, 8:14].reshape(-1, 2, 3),
            torch.stack([row[:, 0].sum() * 0 + row.shape[0], in_order.sum()]),
            answers[:, 13:18].unsqueeze(2),
            answers[:, 17],
            pairs[:, 0] - 2 * pairs[:, 1] + scalars[1],
            rank,
        )
