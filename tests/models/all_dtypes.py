"""A model that reads every dtype, as `columns` and as `matrix`, and writes every dtype.

For uint16 and uint32 columns its output is int64, as models seldom compute in these types.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from soa import Block, Layout, RowRange, Signature, column, eigen
from soa.dtypes import DTYPES

FLOATS = ("float16", "bfloat16", "float32", "float64")
INTEGERS = ("int8", "int16", "int32", "int64", "uint8", "uint16", "uint32")

EVERY = Layout([column(d, d) for d in DTYPES] + [eigen(f"two_{d}", d, 2) for d in DTYPES])
WRITTEN = Layout(
    [column(d, d) for d in FLOATS]
    + [eigen(f"mat_{d}", d, 2, 2) for d in DTYPES]
    + [eigen("not_ours", "int64", 2)]
)
LOOSE = Layout([eigen(d, d, 2) for d in ("bool", *INTEGERS)], storage="columns")


def signature() -> Signature:
    """One block with all dtypes together (plan `columns`), and one `matrix` for each dtype."""
    return Signature.build(
        {"every": EVERY, "written": WRITTEN, "loose": LOOSE},
        [
            Block("mixed", "every", DTYPES, "float32"),
            *(Block(f"in_{d}", "every", (f"two_{d}",), "float32") for d in DTYPES),
        ],
        [
            Block("floats", "written", FLOATS, "float32"),
            *(Block(f"loose_{d}", "loose", (d,)) for d in ("bool", *INTEGERS)),
            *(Block(f"out_{d}", "written", (f"mat_{d}",)) for d in DTYPES),
        ],
        {"n": RowRange(0, 100, (33,))},
    )


class AllDtypes(nn.Module):
    """Answers between 0 and 99 (0 or 1 for bool): every dtype holds them exactly."""

    weights: Tensor

    def __init__(self) -> None:
        super().__init__()
        weights = (torch.arange(36 * 8) * 7 % 13 - 6).reshape(36, 8)
        self.register_buffer("weights", weights.float())

    def forward(
        self,
        mixed: Tensor,
        in_bool: Tensor,
        in_int8: Tensor,
        in_int16: Tensor,
        in_int32: Tensor,
        in_int64: Tensor,
        in_uint8: Tensor,
        in_uint16: Tensor,
        in_uint32: Tensor,
        in_float16: Tensor,
        in_bfloat16: Tensor,
        in_float32: Tensor,
        in_float64: Tensor,
    ) -> tuple[Tensor, ...]:
        row = torch.cat(
            [
                mixed,
                in_bool,
                in_int8,
                in_int16,
                in_int32,
                in_int64,
                in_uint8,
                in_uint16,
                in_uint32,
                in_float16,
                in_bfloat16,
                in_float32,
                in_float64,
            ],
            dim=1,
        )
        y = (row @ self.weights).remainder(100)
        square = y[:, 4:8].reshape(-1, 2, 2)
        whole = square.long()
        return (
            y[:, 0:4],
            y[:, 0:2] > 50,
            y[:, 0:2].to(torch.int8),
            y[:, 1:3].to(torch.int16),
            y[:, 2:4].to(torch.int32),
            y[:, 3:5].long(),
            y[:, 4:6].to(torch.uint8),
            y[:, 5:7].long(),
            y[:, 6:8].long(),
            square > 50,
            whole.to(torch.int8),
            whole.to(torch.int16),
            whole.to(torch.int32),
            whole,
            whole.to(torch.uint8),
            whole,
            whole,
            square.half(),
            square.bfloat16(),
            square,
            square.double(),
        )
