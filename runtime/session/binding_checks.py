"""The checks of memory before it is bound: type, layout, device, writability, overlap, rows.

An artifact checks none of this when it runs; everything is checked here, once.
"""

from __future__ import annotations

from collections.abc import Mapping

from runtime.errors import BindError
from soa.layout import Layout
from soa.memory import Collection, Device
from soa.signature import Signature

Collections = Collection | Mapping[str, Collection]


def common_device(*given: Collections) -> Device:
    """Return the device that all collections lie on. Raises BindError if there are several."""
    devices = set[Device]()
    for argument in given:
        for collection in argument.values() if isinstance(argument, Mapping) else [argument]:
            if not isinstance(collection, Collection):
                kind = type(collection).__name__
                raise BindError(f"a {kind} was given: give a Collection, or a dict of them by name")
            devices.add(collection.device)
    if len(devices) != 1:
        names = ", ".join(sorted(devices)) or "no device"
        raise BindError(
            f"the collections lie on {names}: they must all lie on one device", code="bind-device"
        )
    return devices.pop()


def name_collections(
    signature: Signature, inputs: Collections, outputs: Collections
) -> tuple[dict[str, Collection], dict[str, Collection]]:
    """Return the inputs and the outputs as mappings by the names of the model's collections.

    A model with one input may get the collection alone; the same holds for an output. Raises
    BindError if the names do not match.
    """
    return (
        _by_name(inputs, signature.input_collections, "input"),
        _by_name(outputs, signature.output_collections, "output"),
    )


def _by_name(given: Collections, names: tuple[str, ...], role: str) -> dict[str, Collection]:
    """Return the collections given as `role`, "input" or "output", by name.

    `names`: the model's collections of this role. Raises BindError if the given ones are others.
    """
    if isinstance(given, Collection):
        if len(names) != 1:
            raise BindError(f"the model has {role} collections {', '.join(names)}: give a dict")
        return {names[0]: given}
    if not isinstance(given, Mapping):
        raise BindError(
            f"{role} is a {type(given).__name__}: give a Collection, or a dict of them by name"
        )
    if set(given) != set(names):
        raise BindError(
            f"{role} collections {', '.join(sorted(map(str, given))) or 'none'} given, "
            f"the model has {', '.join(names)}"
        )
    for name, collection in given.items():
        if not isinstance(collection, Collection):
            raise BindError(f"{name!r} is a {type(collection).__name__}, not a Collection")
    return dict(given)


def check_memory(
    signature: Signature,
    inputs: Mapping[str, Collection],
    outputs: Mapping[str, Collection],
    any_start: bool,
) -> dict[str, int]:
    """Check all collections of a call, and return their row counts by dimension.

    Type, layout, writability, overlap and rows are checked; not the names and the device.
    `any_start`: windows may begin at any row. Raises BindError.
    """
    for name, collection in {**inputs, **outputs}.items():
        _check_layout(name, collection.layout, signature)
        step = signature.layouts[name].row_step
        if collection.start % step and not any_start:
            raise BindError(
                f"collection {name!r} is a window from row {collection.start} on, and this version "
                f"was not validated on such windows: begin at a multiple of {step} rows, or "
                "build the version again (pipeline run, then promote)",
                code="bind-rows",
            )
    _check_outputs(inputs, outputs)
    _check_overlap(inputs, outputs)
    rows = _common_rows(signature, {**inputs, **outputs})
    _check_range(signature, rows)
    return rows


def _check_outputs(inputs: Mapping[str, Collection], outputs: Mapping[str, Collection]) -> None:
    """Raise BindError for an output that cannot be written.

    Also if the model reads and writes a collection, and input and output are different ones.
    """
    for name, collection in outputs.items():
        if inputs.get(name, collection) is not collection:
            raise BindError(
                f"the model reads and writes collection {name!r}: give the same one as input and "
                "as output",
                code="bind-overlap",
            )
        if collection.readonly:
            reason = ""
            if collection.copied:
                copied = ", ".join(collection.copied)
                reason = (
                    f": as_collection copied {copied}, so that your own arrays would not be written"
                )
            raise BindError(
                f"output collection {name!r} is read-only memory{reason}", code="bind-read-only"
            )


def _check_layout(name: str, found: Layout, signature: Signature) -> None:
    """Raise BindError if `found`, the layout of a given collection, is not the model's."""
    wanted = signature.layouts[name]
    if found == wanted:
        return
    where = f"collection {name!r}"
    for other, layout in signature.layouts.items():
        if found == layout:
            raise BindError(
                f"{where} has the layout of {other!r}: are they swapped? Inputs come first "
                f"({', '.join(signature.input_collections)}), then outputs "
                f"({', '.join(signature.output_collections)})",
                code="bind-layout",
            )
    _check_columns(where, found, wanted)
    if found.storage == wanted.storage == "columns" and found.alignment >= wanted.alignment:
        return  # separate columns may have a larger alignment than the model needs
    raise BindError(
        f"{where} is stored as {found.storage!r} and aligned to {found.alignment} bytes, the model "
        f"was compiled for {wanted.storage!r} and {wanted.alignment}: "
        f"as_collection(data, session.layout({name!r})) converts it",
        code="bind-layout",
    )


def _check_columns(where: str, found: Layout, wanted: Layout) -> None:
    """Raise BindError for the first column that differs in name, dtype or shape.

    `where`: the collection, for the message.
    """
    if [*found.by_name] != [*wanted.by_name]:
        raise BindError(
            f"{where} has the columns {', '.join(found.by_name)}; the model was compiled for "
            f"{', '.join(wanted.by_name)}, in this order",
            code="bind-layout",
        )
    for column, expected in zip(found.columns, wanted.columns, strict=True):
        if column.dtype != expected.dtype:
            raise BindError(
                f"{where}: column {expected.name!r} is {column.dtype}, "
                f"the model was compiled for {expected.dtype}",
                code="bind-dtype",
            )
        if (column.kind, column.shape) != (expected.kind, expected.shape):
            raise BindError(
                f"{where}: column {expected.name!r} is {column.kind} {list(column.shape)}, "
                f"the model was compiled for {expected.kind} {list(expected.shape)}",
                code="bind-layout",
            )


def _check_overlap(inputs: Mapping[str, Collection], outputs: Mapping[str, Collection]) -> None:
    """Raise BindError if an output shares a byte with any other bound memory."""
    spans = [
        (span.address, span.address + span.nbytes, name)
        for name, collection in {**inputs, **outputs}.items()
        for span in collection.spans()
        if span.nbytes
    ]
    # By ascending start, a span overlaps an earlier one if it begins before the largest end so far.
    largest_end, holder = 0, ""
    for start, end, name in sorted(spans):
        if start < largest_end and (name in outputs or holder in outputs):
            raise BindError(
                f"collections {holder!r} and {name!r} overlap in memory", code="bind-overlap"
            )
        if end > largest_end:
            largest_end, holder = end, name


def _common_rows(signature: Signature, collections: Mapping[str, Collection]) -> dict[str, int]:
    """Return the row counts by dimension. Raises BindError if collections of one differ."""
    first_of_dim: dict[str, str] = {}
    for name, collection in collections.items():
        dim = signature.rows_of[name]
        other = first_of_dim.setdefault(dim, name)
        if collections[other].n != collection.n:
            raise BindError(
                f"collection {name!r} has {collection.n} rows, {other!r} has "
                f"{collections[other].n}: both are rows of {dim!r}",
                code="bind-rows",
            )
    return {dim: collections[first_of_dim[dim]].n for dim in signature.dims}


def _check_range(signature: Signature, rows: Mapping[str, int]) -> None:
    """Raise BindError if a row count lies outside the compiled range."""
    for dim, n in rows.items():
        low, high = signature.ranges[dim].min, signature.ranges[dim].limit
        if not low <= n <= high:
            raise BindError(
                f"{dim} = {n} is outside the compiled range {low} … {high}: "
                "run windows of it, collection.window(start, stop), or build the model with a "
                "larger rows: max or rows: unbounded",
                code="bind-rows",
            )
