"""A signature as plain lines, for programs without Python (see native/include/soa_model.hpp).

One record per line, fields separated by one space::

    soa-arguments 2
    rows NAME MIN MAX
    collection NAME ROWS ALIGNMENT STORAGE
    column COLLECTION NAME DTYPE ITEMSIZE KIND COMPONENTS
    argument KIND ROWS DTYPE COLLECTION COLUMN COMPONENT COUNT ROLE
    tile ROWS KINDS LIMIT
    windows any

A column's KIND is column, scalar or eigen; an argument's is carrier, matrix, column or scalar. A
carrier's COLLECTION and COLUMN are `-`. Columns come in the order of the layout, arguments in the
order of the artifact. STORAGE is buffer or columns. If every STORAGE is buffer, the field is left
out and the first line is `soa-arguments 1`, which programs built for the older format can read. A
line `tile` means that a run takes ROWS rows at a time (see soa_call_tile); LIMIT is the largest n.
A line `windows any` means that windows of larger collections may begin at any row; without it they
begin where every column is aligned. Older programs ignore this line.
"""

from __future__ import annotations

from soa.dtypes import itemsize
from soa.signature import Signature


def describe(signature: Signature, tile: int | None = None, windows: bool = False) -> str:
    """Return the lines of a signature as one text. Every line ends with a newline.

    `tile`: the rows of a tile, if runs are cut into tiles. Then `signature.tile_kinds` must not be
    None. `windows`: whether windows of larger collections may begin at any row.
    """
    only_buffers = all(layout.storage == "buffer" for layout in signature.layouts.values())
    lines = [f"soa-arguments {1 if only_buffers else 2}"]
    for dim in signature.dims:
        lines.append(f"rows {dim} {signature.ranges[dim].min} {signature.ranges[dim].max}")
    for name, layout in signature.layouts.items():
        storage = "" if only_buffers else f" {layout.storage}"
        lines.append(f"collection {name} {signature.rows_of[name]} {layout.alignment}{storage}")
        lines += [
            f"column {name} {column.name} {column.dtype} {itemsize(column.dtype)} {column.kind} "
            f"{column.components}"
            for column in layout.columns
        ]
    lines += [
        f"argument {item.kind} {item.rows} {item.dtype} {item.collection or '-'} "
        f"{item.column or '-'} {item.component} {item.count} {item.role}"
        for item in signature.arguments
    ]
    if tile is not None:
        limit = max(rows.limit for rows in signature.ranges.values())
        lines.append(f"tile {tile} {signature.tile_kinds} {limit}")
    if windows:
        lines.append("windows any")
    return "\n".join(lines) + "\n"
