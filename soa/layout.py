"""Layout: which columns a collection has, and where each of their bytes lies.

The byte layout is that of CMSSW's `GENERATE_SOA_LAYOUT` (cms-sw/cmssw, DataFormats/SoATemplate,
`SoALayout.h` and `SoACommon.h`). Members follow one another in order of declaration. Each starts at
a multiple of the alignment (128 bytes unless set) and is padded up to the next multiple::

    pitch(column)  = ceil(n * sizeof(T) / alignment) * alignment
    pitch(scalar)  = ceil(sizeof(T) / alignment) * alignment
    size(eigen)    = pitch(column of its Scalar) * rows * cols

Each component of an Eigen column is a column of its own. CMSSW maps them with
`Eigen::Map<Matrix, 0, InnerStride<Dynamic>>(address + i, stride)`, so the components follow Eigen's
storage order, which is column-major: component k = column * rows + row.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from itertools import product
from typing import Literal

from soa.dtypes import DTYPES, is_opaque, itemsize
from soa.errors import LayoutError
from soa.options import TEXT, Accepted, check_fields, find_repeated, nearest_hint, takes

IDENTIFIER = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
"""The names that columns, blocks, collections and row dimensions of a model may have.

C++, Triton and files with fields separated by spaces use the same names.
"""

Kind = Literal["column", "scalar", "eigen"]
Storage = Literal["buffer", "columns"]
DEFAULT_ALIGNMENT = 128
_MOST_COMPONENTS = 1 << 16
_LARGEST_ALIGNMENT = 1 << 30


@dataclass(frozen=True)
class Column:
    """One named member of a layout.

    `shape` is `()` for a plain column and a scalar, `(r,)` for an Eigen vector, `(r, c)` for an
    Eigen matrix. A stored column may have any Python identifier as its name, because older versions
    allowed it.

    Examples
    --------
    >>> eigen("covariance", "float32", 3, 3).components
    9
    """

    name: str
    dtype: str
    kind: Kind = "column"
    shape: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        check_fields(LayoutError, "column", self, {"name": TEXT, "dtype": TEXT})
        if not self.name.isidentifier():
            raise LayoutError(
                f"column name {self.name!r} is not an identifier (letters, digits, _)"
            )
        if self.kind not in ("column", "scalar", "eigen"):
            raise LayoutError(
                f"column {self.name!r}: kind {self.kind!r} is none of column, scalar, eigen"
            )
        try:
            itemsize(self.dtype)
        except LayoutError as error:
            raise LayoutError(f"column {self.name!r}: {error}") from None
        if self.kind == "eigen":
            self._check_eigen()
        elif self.shape:
            raise LayoutError(f"{self.kind} {self.name!r} has no shape, found {list(self.shape)}")

    def _check_eigen(self) -> None:
        """Raise LayoutError unless the column is a vector or a matrix of numbers."""
        if is_opaque(self.dtype):
            raise LayoutError(f"Eigen column {self.name!r} is {self.dtype}, not numbers")
        if not 1 <= len(self.shape) <= 2 or any(
            type(extent) is not int or extent < 1 for extent in self.shape
        ):
            raise LayoutError(
                f"Eigen column {self.name!r} has shape {list(self.shape)}: "
                "give [rows] or [rows, cols], each at least 1"
            )
        if self.components > _MOST_COMPONENTS:
            raise LayoutError(
                f"Eigen column {self.name!r} has {self.components} entries: at most "
                f"{_MOST_COMPONENTS} are allowed"
            )

    @property
    def own_alignment(self) -> int:
        """The alignment in bytes that one element needs; opaque elements need none."""
        return 1 if is_opaque(self.dtype) else itemsize(self.dtype)

    @property
    def components(self) -> int:
        """The number of physical columns: 1, or the number of entries of the Eigen object."""
        return math.prod(self.shape)

    @property
    def entries(self) -> list[str]:
        """The names of an Eigen column's entries in other libraries, row by row.

        They are `e0, e1, ...` for a vector, `e0_0, e0_1, ...` for a matrix.

        Examples
        --------
        >>> eigen("p", "float32", 3).entries
        ['e0', 'e1', 'e2']
        """
        return ["e" + "_".join(map(str, index)) for index in product(*map(range, self.shape))]

    def component_of(self, index: int) -> int:
        """Return the number of the physical component that holds an entry.

        Entries are counted row by row (`index`), components column by column, as Eigen stores them.

        Examples
        --------
        >>> eigen("matrix", "float32", 2, 3).component_of(1)  # of row 0 and column 1
        2
        """
        if len(self.shape) < 2:
            return index
        rows, cols = self.shape
        row, col = divmod(index, cols)
        return col * rows + row


def column(name: str, dtype: str) -> Column:
    """Return a plain column, which has one value per element (`SOA_COLUMN`).

    Examples
    --------
    >>> column("pt", "float32")
    Column(name='pt', dtype='float32', kind='column', shape=())
    """
    return Column(_require_identifier(name), dtype)


def opaque(name: str, nbytes: int) -> Column:
    """Return a column of `nbytes` bytes per element that no model reads: a struct, a std::array.

    Examples
    --------
    >>> Layout([column("pt", "float32"), opaque("hits", 24)]).nbytes(100)
    2944
    """
    return Column(_require_identifier(name), f"opaque{nbytes}")


def scalar(name: str, dtype: str) -> Column:
    """Return a scalar, which has one value for the whole collection (`SOA_SCALAR`).

    Examples
    --------
    >>> event = Collection(Layout([column("pt", "float32"), scalar("rho", "float32")]), 5)
    >>> event["rho"][...] = 12.5
    >>> event["rho"]
    array(12.5, dtype=float32)
    """
    return Column(_require_identifier(name), dtype, "scalar")


def eigen(name: str, dtype: str, *shape: int) -> Column:
    """Return a column with a vector `(r)` or matrix `(r, c)` per element (`SOA_EIGEN_COLUMN`).

    Examples
    --------
    >>> Collection(Layout([eigen("p4", "float32", 4)]), 5)["p4"].shape
    (5, 4)
    """
    return Column(_require_identifier(name), dtype, "eigen", tuple(shape))


def _require_identifier(name: str) -> str:
    """Return the name itself; raise LayoutError if it is a text that is no identifier.

    `Column` refuses a name that is no text.
    """
    if isinstance(name, str) and not IDENTIFIER.fullmatch(name):
        raise LayoutError(f"column name {name!r} is not an identifier (A-Z a-z 0-9 _)")
    return name


@dataclass(frozen=True)
class Layout:
    """Ordered columns and their alignment in bytes.

    `storage` is `buffer` or `columns`. `buffer`: one CMSSW-compatible buffer holds every column,
    aligned to 128 bytes by default. `columns`: each physical column is a separate piece of memory,
    as in Arrow. Then the default alignment is 1: each column is aligned to the size of its element.

    Examples
    --------
    >>> layout = Layout([column("pt", "float32"), column("charge", "int8")])
    >>> layout.offsets(100), layout.nbytes(100)
    ({'pt': 0, 'charge': 512}, 640)
    """

    columns: tuple[Column, ...]
    alignment: int = DEFAULT_ALIGNMENT
    storage: Storage = "buffer"

    @takes(
        LayoutError,
        columns=Accepted(
            "the columns: column(…), eigen(…), scalar(…)",
            lambda value: isinstance(value, Iterable),
        ),
        storage=TEXT,
    )
    def __init__(
        self,
        columns: Iterable[Column],
        alignment: int | None = None,
        storage: Storage = "buffer",
    ) -> None:
        if alignment is None:
            alignment = 1 if storage == "columns" else DEFAULT_ALIGNMENT
        # The class is frozen, but its constructor takes other types than its fields have.
        object.__setattr__(self, "columns", tuple(columns))
        object.__setattr__(self, "alignment", alignment)
        object.__setattr__(self, "storage", storage)
        self._check()

    def _check(self) -> None:
        """Raise LayoutError if columns, alignment or storage are not possible."""
        if not self.columns:
            raise LayoutError("a layout needs at least one column")
        if others := [member for member in self.columns if not isinstance(member, Column)]:
            raise LayoutError(
                f"Layout: {others[0]!r} is no column: use column(…), eigen(…), scalar(…)"
            )
        if twice := find_repeated(member.name for member in self.columns):
            raise LayoutError(f"column {twice[0]!r} is declared twice")
        powers = (1 << bit for bit in range(_LARGEST_ALIGNMENT.bit_length()))
        if type(self.alignment) is not int or self.alignment not in powers:
            raise LayoutError(
                f"alignment {self.alignment} is not a power of two up to {_LARGEST_ALIGNMENT}"
            )
        widest = max(self.columns, key=lambda member: member.own_alignment)
        if self.storage == "buffer" and self.alignment < widest.own_alignment:
            raise LayoutError(
                f"alignment {self.alignment} is smaller than one element of "
                f"{widest.name!r} ({widest.dtype}, {itemsize(widest.dtype)} bytes)"
            )
        if self.storage not in ("buffer", "columns"):
            raise LayoutError(f"storage {self.storage!r} is neither 'buffer' nor 'columns'")

    @cached_property
    def numbers(self) -> tuple[Column, ...]:
        """The members that a model may read: all except uint64 and opaque ones."""
        return tuple(member for member in self.columns if member.dtype in DTYPES)

    @cached_property
    def by_name(self) -> Mapping[str, Column]:
        """Each member by its name."""
        return {member.name: member for member in self.columns}

    def __getitem__(self, name: str) -> Column:
        """Return the member of this name. Raises LayoutError if there is none."""
        try:
            return self.by_name[name]
        except (KeyError, TypeError):  # TypeError: a list, which is no name
            names = ", ".join(member.name for member in self.columns)
            hint = nearest_hint(name, self.by_name)
            raise LayoutError(
                f"no column {name!r} in the layout, which has: {names}{hint}"
            ) from None

    def alignment_of(self, name: str) -> int:
        """The alignment of a column's address, in bytes.

        Examples
        --------
        >>> Layout([column("energy", "float64")], storage="columns").alignment_of("energy")
        8
        """
        return max(self.alignment, self[name].own_alignment)

    @cached_property
    def row_step(self) -> int:
        """The number of rows after which every column is aligned as at its first row.

        For one column this is its alignment divided by the size of its element. Both are powers of
        two, so the largest quotient is a multiple of all the others. Columns that no model reads
        do not count.
        """
        return max(
            (self.alignment_of(member.name) // member.own_alignment for member in self.numbers),
            default=1,
        )

    def pitch(self, name: str, n: int) -> int:
        """Return the bytes from the start of one component of a column to the next, for n elements.

        Examples
        --------
        >>> Layout([column("pt", "float32")]).pitch("pt", 33)
        256
        """
        member = self[name]
        elements = 1 if member.kind == "scalar" else n
        nbytes = elements * itemsize(member.dtype)
        return -(-nbytes // self.alignment) * self.alignment  # -(-a // b) rounds a / b up

    def padded_length(self, name: str, n: int) -> int:
        """Return the elements from one component of a column to the next (CMSSW's Eigen stride).

        Examples
        --------
        >>> Layout([column("pt", "float32")]).padded_length("pt", 33)
        64
        """
        return self.pitch(name, n) // itemsize(self[name].dtype)

    def offsets(self, n: int) -> dict[str, int]:
        """Return the byte offset of each column (its component 0) from the start of the buffer.

        Examples
        --------
        >>> Layout([column("pt", "float32"), scalar("rho", "float64")]).offsets(33)
        {'pt': 0, 'rho': 256}
        """
        offsets: dict[str, int] = {}
        end = 0  # the bytes that the columns so far take
        for member in self.columns:
            offsets[member.name] = end
            end += self.pitch(member.name, n) * member.components
        return offsets

    def nbytes(self, n: int) -> int:
        """Return the bytes of the buffer for n elements (CMSSW's `computeDataSize`).

        Examples
        --------
        >>> Layout([column("pt", "float32")]).nbytes(33)
        256
        """
        if n < 0:
            raise LayoutError(f"a collection cannot have {n} elements")
        return sum(self.pitch(member.name, n) * member.components for member in self.columns)
