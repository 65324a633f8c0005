"""Binding refuses all memory whose faults an artifact itself would not notice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch

from engines import Executable
from engines.errors import RunError
from runtime.checked import Tolerance
from runtime.checked.test_mode import CheckedSession
from runtime.errors import BindError
from runtime.session import Binding, RangedExecutable
from runtime.session.origin import Origin
from runtime.session.session import Session
from soa import Block, Collection, Layout, RowRange, Signature, column, eigen, scalar
from soa.memory import as_collection
from tests.models import detector, rogues
from tests.models.building import ENGINES, JETS, TAGS, Built, mlp_signature
from tests.models.mlps import CLASSES, FEATURES


def simple(inputs: Layout, outputs: Layout = TAGS) -> Signature:
    """Reads the first column and writes `x`; one collection if both layouts are the same."""
    out = "i" if inputs is outputs else "o"
    return Signature.build(
        {"i": inputs, out: outputs},
        [Block("features", "i", (inputs.columns[0].name,))],
        [Block("y", out, ("x",))],
        {"n": RowRange(0, 10)},
    )


class Records(Executable):
    """An executable that keeps the arguments of its calls."""

    def __init__(self) -> None:
        self.calls: list[list[torch.Tensor]] = []

    def __call__(self, arguments: Sequence[torch.Tensor]) -> None:
        self.calls.append(list(arguments))


SESSION = Session(mlp_signature(100, (), 2), Records())
ANYTHING = Tolerance(0.0, 0.0, max_outside=1.0)


def refusal(inputs: Any, outputs: Any, session: Session = SESSION) -> str:
    """The error, of one line, with which the memory is not bound."""
    with pytest.raises(BindError) as caught:
        session.bind(inputs, outputs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def jets(n: int = 5, capacity: int | None = None) -> Collection:
    return Collection(JETS, n, capacity=capacity)


def tags(n: int = 5, capacity: int | None = None) -> Collection:
    return Collection(TAGS, n, capacity=capacity)


# -- layouts ---------------------------------------------------------------------------------------


def test_swapped_collections_are_named() -> None:
    with pytest.raises(BindError, match=r"'jets' has the layout of 'tags': are they swapped\?"):
        SESSION.bind(tags(), jets())


@pytest.mark.parametrize(
    "ask",
    [SESSION.layout, lambda name: SESSION.collection(name, 5)],
    ids=["layout", "collection"],
)
def test_a_name_that_no_collection_has_is_refused(ask: Callable[[str], object]) -> None:
    with pytest.raises(BindError, match="no collection 'jet'; it has: jets, tags"):
        ask("jet")


def floats(names: Sequence[str]) -> list[Any]:
    return [column(name, "float32") for name in names]


@pytest.mark.parametrize(
    ("layout", "message"),
    [
        (Layout(floats("abcde")), " has the columns a, b, c, d, e; the model was compiled for a, "),
        (Layout(floats("bacdef")), " has the columns b, a, c, d, e, f; the model was compiled for"),
        (
            Layout([*floats("abcde"), column("f", "float64")]),
            ": column 'f' is float64, the model was compiled for float32",
        ),
        (
            Layout([*floats("abcde"), scalar("f", "float32")]),
            ": column 'f' is scalar [], the model was compiled for column []",
        ),
        (Layout(floats("abcdef"), 64), " is stored as 'buffer' and aligned to 64 bytes, the model"),
        (Layout(floats("abcdef"), storage="columns"), " is stored as 'columns' and aligned to 1"),
    ],
)
def test_a_layout_that_is_not_the_models_is_refused(layout: Layout, message: str) -> None:
    assert refusal(Collection(layout, 5), tags()).startswith(f"collection 'jets'{message}")


@pytest.mark.parametrize("name", "abcdef")
def test_every_column_of_a_layout_counts(name: str) -> None:
    columns = [column(letter, "int32" if letter == name else "float32") for letter in "abcdef"]
    assert refusal(Collection(Layout(columns), 5), tags()) == (
        f"collection 'jets': column '{name}' is int32, the model was compiled for float32"
    )


def test_an_eigen_column_of_another_shape_is_refused() -> None:
    signature = simple(Layout([eigen("m", "float32", 2, 3)]))
    turned = Collection(Layout([eigen("m", "float32", 3, 2)]), 5)
    assert refusal(turned, tags(), Session(signature, Records())) == (
        "collection 'i': column 'm' is eigen [3, 2], the model was compiled for eigen [2, 3]"
    )


def test_separate_columns_may_be_aligned_better_than_needed() -> None:
    def layout(alignment: int) -> Layout:
        return Layout(floats("a"), alignment, "columns")

    session = Session(simple(layout(64)), Records())
    session.bind(Collection(layout(128), 5), tags())
    assert "aligned to 32 bytes" in refusal(Collection(layout(32), 5), tags(), session)


# -- collections -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        ({}, "input collections none given, the model has jets"),
        ({"jets": jets(), "tags": tags()}, "input collections jets, tags given, the model has"),
        ({"jets": torch.zeros(5, 6)}, "'jets' is a Tensor, not a Collection"),
        ([jets()], "input is a list: give a Collection, or a dict of them by name"),
    ],
)
def test_inputs_that_are_not_the_models_collections_are_refused(inputs: Any, message: str) -> None:
    assert refusal(inputs, tags()).startswith(message)


def test_one_collection_where_the_model_has_several_is_refused() -> None:
    session = Session(detector.signature(), Records())
    message = refusal(Collection(detector.HITS, 1), {}, session)
    assert message == "the model has input collections hits, arrow, packed, pairs: give a dict"


def test_an_output_of_another_name_is_refused() -> None:
    message = refusal(jets(), {"jets": jets()})
    assert message == "output collections jets given, the model has tags"


def test_memory_of_another_device_is_refused() -> None:
    elsewhere = Session(mlp_signature(), Records(), "meta")
    assert refusal(jets(), tags(), elsewhere) == (
        "collection 'jets' lies on cpu, the session runs on meta: load the model on the device "
        "where the data is"
    )


def test_read_only_memory_is_an_input_only() -> None:
    assert refusal(jets(), tags().locked()) == "output collection 'tags' is read-only memory"
    SESSION.bind(jets().locked(), tags())


# -- row counts ------------------------------------------------------------------------------------


def test_collections_of_one_dimension_with_different_rows_are_refused() -> None:
    assert refusal(jets(5), tags(6)) == (
        "collection 'tags' has 6 rows, 'jets' has 5: both are rows of 'n'"
    )


@pytest.mark.parametrize("n", [0, 1, 101])
def test_rows_outside_the_compiled_range_are_refused(n: int) -> None:
    message = refusal(jets(n), tags(n))
    assert message.startswith(f"n = {n} is outside the compiled range 2 … 100: ")
    assert "rows: unbounded" in message


@pytest.mark.parametrize("n", [2, 100])
def test_rows_at_the_ends_of_the_compiled_range(n: int) -> None:
    binding = SESSION.bind(jets(n), tags(n))
    binding()
    assert binding.rows == {"n": n}


DETECTOR = Session(detector.signature(), Records())
"""A session of a model with two row dimensions, `n` and `m`."""


def memory(n: int, m: int) -> tuple[dict[str, Collection], dict[str, Collection]]:
    """Inputs and outputs of `DETECTOR`."""
    signature, size = DETECTOR.signature, {"n": n, "m": m}
    inputs, outputs = (
        {name: DETECTOR.collection(name, size[signature.rows_of[name]]) for name in names}
        for names in (signature.input_collections, signature.output_collections)
    )
    return inputs, outputs


def test_rows_of_two_dimensions_are_independent() -> None:
    binding = DETECTOR.bind(*memory(7, 60))
    assert binding.rows == {"n": 7, "m": 60}
    binding({"n": 3, "m": 9})
    assert binding.rows == {"n": 3, "m": 9}


def test_each_dimension_has_its_compiled_range() -> None:
    message = refusal(*memory(7, 71), DETECTOR)
    assert message.startswith("m = 71 is outside the compiled range 0 … 70")


def test_collections_of_the_same_dimension_have_the_same_rows() -> None:
    inputs, outputs = memory(7, 60)
    outputs["loose"] = DETECTOR.collection("loose", 8)
    assert refusal(inputs, outputs, DETECTOR) == (
        "collection 'loose' has 8 rows, 'hits' has 7: both are rows of 'n'"
    )


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ({"n": 3}, r"rows for \['n'\], this model has \['m', 'n'\]"),
        ({"n": 3, "m": 61}, r"m = 61 is outside 0 … 60"),
        (8, r"n = 8 is outside 0 … 7"),
    ],
)
def test_rows_of_a_call_that_the_bound_memory_does_not_have_are_refused(
    rows: Any, message: str
) -> None:
    binding = DETECTOR.bind(*memory(7, 60))
    with pytest.raises(BindError, match=message):
        binding(rows)


# -- overlap ---------------------------------------------------------------------------------------


def shared(offset: int, nbytes: int = 8192) -> Collection:
    """TAGS of 5 rows (384 bytes) at an offset in one common block of memory."""
    return Collection.wrap(TAGS, BLOCK.narrow(0, offset, nbytes - offset), 5)


BLOCK = Collection(Layout([column("bytes", "uint8")]), 8192).memory()[0]
TWO = Signature.build(
    {name: TAGS for name in ("in1", "in2", "out1", "out2")},
    [Block("a", "in1", CLASSES), Block("b", "in2", CLASSES)],
    [Block("c", "out1", CLASSES), Block("d", "out2", CLASSES)],
    {"n": RowRange(0, 10)},
)


@pytest.mark.parametrize(
    ("offsets", "names"),
    [
        ((0, 1024, 0, 4096), "'in1' and 'out1'"),
        ((256, 1024, 0, 4096), "'out1' and 'in1'"),
        ((0, 1024, 2048, 2304), "'out1' and 'out2'"),
        ((0, 128, 4096, 384), "'in2' and 'out2'"),
    ],
)
def test_outputs_overlap_nothing(offsets: tuple[int, ...], names: str) -> None:
    in1, in2, out1, out2 = map(shared, offsets)
    session = Session(TWO, Records())
    message = refusal({"in1": in1, "in2": in2}, {"out1": out1, "out2": out2}, session)
    assert message == f"collections {names} overlap in memory"


def test_neighbours_do_not_overlap_and_inputs_may() -> None:
    in1, in2, out1, out2 = map(shared, (0, 0, 384, 768))
    Session(TWO, Records()).bind({"in1": in1, "in2": in2}, {"out1": out1, "out2": out2})


# -- what is bound ---------------------------------------------------------------------------------


def test_arguments_are_views_of_the_callers_memory() -> None:
    """Nothing is copied: each argument lies in a collection's memory, also after another n."""
    signature = detector.signature()
    records = Records()
    session = Session(signature, records)
    size = {"n": 7, "m": 5}
    collections = {
        name: Collection(layout, size[signature.rows_of[name]], capacity=40)
        for name, layout in signature.layouts.items()
    }
    binding = session.bind(
        {name: collections[name] for name in signature.input_collections},
        {name: collections[name] for name in signature.output_collections},
    )
    binding()
    binding({"n": 33, "m": 2})
    for call in records.calls:
        for argument, tensor in zip(signature.arguments, call, strict=True):
            if argument.kind == "carrier":  # its shape alone is read, as that of the rows
                assert tensor.nbytes == 0
            else:
                collection = collections[argument.collection]
                assert tensor.is_contiguous()
                assert lies_within(tensor, collection), argument
                start = collection.span(argument.column, argument.component).tensor()
                assert tensor.data_ptr() == start.data_ptr()
    shapes = [[tuple(tensor.shape) for tensor in call[:3]] for call in records.calls]
    assert shapes == [[(7, 0), (5, 0), (3, 64)], [(33, 0), (2, 0), (3, 64)]]


def lies_within(tensor: torch.Tensor, collection: Collection) -> bool:
    """Whether all bytes of the tensor are in one piece of the collection's memory."""
    return any(
        piece.data_ptr() <= tensor.data_ptr()
        and tensor.data_ptr() + tensor.nbytes <= piece.data_ptr() + piece.nbytes
        for piece in collection.memory()
    )


def test_a_binding_keeps_its_memory_alive(mlp: Built) -> None:
    inputs, outputs = mlp.collections({"n": 100})
    expected = inputs["jets"].memory()[0].clone()
    binding = mlp.session("aoti").bind(inputs, outputs)
    binding()
    answer = outputs["tags"].memory()[0].clone()
    del inputs, outputs
    # If the memory had been freed, some of these would be written into it.
    junk = [torch.full((len(expected),), 1, dtype=torch.uint8) for _ in range(100)]
    binding()
    assert torch.equal(binding.inputs["jets"].memory()[0], expected)
    assert torch.equal(binding.outputs["tags"].memory()[0], answer)
    del junk


def test_other_rows_of_the_same_memory_equal_a_fresh_binding(mlp: Built) -> None:
    for engine in mlp.files:
        session = mlp.session(engine)
        inputs, outputs = mlp.collections({"n": 33}, spare=67)
        binding = session.bind(inputs, outputs)
        whole, _ = mlp.collections({"n": 100})
        for name in FEATURES:  # all 100 rows hold values; 33 of them are in use
            inputs["jets"].span(name).tensor().copy_(whole["jets"].span(name).tensor())
        for n in (33, 0, 1, 100, 32, 33):
            answers = {name: outputs["tags"].span(name).tensor() for name in CLASSES}
            for answer in answers.values():
                answer.fill_(float("nan"))
            binding(n)
            assert binding.rows == {"n": n}
            fresh = Collection(TAGS, n, capacity=100)
            session.run(inputs["jets"].rows(n), fresh)
            for name, answer in answers.items():
                assert torch.equal(answer[:n], fresh.tensor(name)), (engine, n)
                assert answer[n:].isnan().all()


@dataclass
class Bound:
    """A binding of 33 rows of memory for 100."""

    session: Session
    binding: Binding
    inputs: dict[str, Collection]
    outputs: dict[str, Collection]

    def answered(self, run: Callable[[], object]) -> int:
        """How many rows have answers after `run`. They are the first ones."""
        column = self.outputs["tags"].span("x").tensor()
        column.fill_(float("nan"))
        run()
        count = int((~column.isnan()).sum())
        assert not column[:count].isnan().any()
        return count


@pytest.fixture(params=[*ENGINES, "ranged", "checked"])
def of_33(mlp: Built, request: pytest.FixtureRequest) -> Bound:
    reference = mlp.executable("exported")
    if request.param == "ranged":
        both = RangedExecutable([(9, mlp.executable("aoti"))], reference)
        session = Session(mlp.signature, both)
    elif request.param == "checked":
        allowed = {"probabilities": ANYTHING}
        session = CheckedSession(mlp.signature, mlp.executable("aoti"), reference, allowed)
    else:
        session = mlp.session(request.param)
    inputs, outputs = mlp.collections({"n": 33}, spare=67)
    return Bound(session, session.bind(inputs, outputs), inputs, outputs)


def test_rows_of_a_call_are_for_that_call(of_33: Bound) -> None:
    binding = of_33.binding
    for n in (5, 50, 0):
        assert of_33.answered(partial(binding, n)) == n
        assert of_33.answered(binding) == 33


@pytest.mark.parametrize("threads", [1, 2])
def test_many_bindings_run_on_their_bound_rows(of_33: Bound, threads: int) -> None:
    of_33.binding(5)
    assert of_33.answered(lambda: of_33.session.run_many([of_33.binding], threads)) == 33


def test_resized_rows_are_for_later_calls_too(of_33: Bound) -> None:
    binding = of_33.binding
    binding.resize(7)
    assert of_33.answered(binding) == 7
    assert of_33.answered(lambda: of_33.session.run_many([binding])) == 7
    assert of_33.answered(lambda: binding(33)) == 33
    assert of_33.answered(binding) == 7


def test_other_memory_brings_its_own_rows(mlp: Built, of_33: Bound) -> None:
    binding = of_33.binding
    binding.resize(5)
    binding.rebind(*mlp.collections({"n": 11}))
    binding.rebind(of_33.inputs, of_33.outputs)
    assert of_33.answered(binding) == 33


@pytest.mark.parametrize("n", [-1, 1, 51, 10**12])
def test_other_rows_beyond_the_memory_or_the_range_are_refused(n: int) -> None:
    binding = SESSION.bind(jets(5, capacity=50), tags(5, capacity=60))
    with pytest.raises(BindError) as caught:
        binding(n)
    assert str(caught.value) == (
        f"n = {n} is outside 2 … 50 (compiled for up to 100, and the bound memory holds 50)"
    )
    assert binding.rows == {"n": 5}


def test_rows_up_to_the_compiled_range_run_in_larger_memory() -> None:
    binding = SESSION.bind(jets(5, capacity=500), tags(5, capacity=500))
    binding(100)
    with pytest.raises(BindError, match="n = 101 is outside 2 … 100"):
        binding(101)


@pytest.mark.parametrize("rows", [2.5, "7", {"n": None}, [7], True])
def test_rows_that_are_no_integer_are_refused(rows: Any) -> None:
    binding = SESSION.bind(jets(5, capacity=50), tags(5, capacity=50))
    with pytest.raises(BindError, match="integer"):
        binding(rows)
    assert binding.rows == {"n": 5}


@pytest.mark.parametrize("rows", [np.int64(7), {"n": np.uint32(7)}], ids=["one", "by name"])
def test_numpys_integers_are_row_counts(rows: Any) -> None:
    binding = SESSION.bind(jets(5, capacity=50), tags(5, capacity=50))
    binding(rows)
    assert binding.rows == {"n": 7}


def test_a_collection_that_is_read_and_written_is_one() -> None:
    layout = Layout([column("a", "float32"), column("x", "float32")])
    session = Session(simple(layout, layout), Records())
    one, other = Collection(layout, 5), Collection(layout, 5)
    session.bind(one, one)()
    assert refusal(one, other, session) == (
        "the model reads and writes collection 'i': give the same one as input and as output"
    )


def test_without_rows_the_artifact_is_not_called() -> None:
    """Some kernels crash at n = 0 (those of torch 2.13's max_autotune, with SIGFPE)."""
    records = Records()
    session = Session(mlp_signature(100), records)
    binding = session.bind(jets(0, capacity=9), tags(0, capacity=9))
    binding()
    session.run_many([binding])
    assert records.calls == []


def test_a_binding_without_rows_may_run_on_some_later() -> None:
    records = Records()
    session = Session(mlp_signature(100), records)
    binding = session.bind(jets(0, capacity=9), tags(0, capacity=9))
    for n in (0, 3, 0):
        binding(n)
    assert [call[0].shape[0] for call in records.calls] == [3]


def test_a_scalar_is_written_without_rows_too() -> None:
    records = Records()
    layout = Layout([column("a", "float32"), scalar("x", "float32")])
    both = Collection(layout, 0)
    Session(simple(layout, layout), records).run(both, both)
    assert len(records.calls) == 1


# -- other memory ----------------------------------------------------------------------------------


def test_rebound_memory_equals_a_fresh_binding(mlp: Built) -> None:
    """With another address, n and padded length, in every engine."""
    for engine in mlp.files:
        session = mlp.session(engine)
        first = mlp.collections({"n": 33})
        binding = session.bind(*first)
        for n, spare in ((100, 0), (7, 60), (33, 31), (0, 5), (1000, 1)):
            inputs, outputs = mlp.collections({"n": n}, spare)
            binding.rebind(inputs, outputs)
            binding()
            assert binding.rows == {"n": n}
            fresh, expected = mlp.collections({"n": n})
            session.run(fresh, expected)
            for name in CLASSES:
                answers = outputs["tags"].tensor(name)
                assert torch.equal(answers, expected["tags"].tensor(name)), (engine, n)
        assert not first[1]["tags"].memory()[0].any()  # the first outputs are not written


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [
        (Collection(Layout(floats("abcde")), 5), tags(), "collection 'jets' has the columns a, b"),
        (jets(5), tags(6), "both are rows of 'n'"),
        ({"tracks": jets()}, tags(), "input collections tracks given"),
    ],
    ids=["a missing column", "different rows", "another name"],
)
def test_memory_that_does_not_fit_leaves_the_binding_as_it_was(
    inputs: Any, outputs: Any, message: str
) -> None:
    first_inputs, first_outputs = jets(), tags()
    binding = SESSION.bind(first_inputs, first_outputs)
    with pytest.raises(BindError, match=message):
        binding.rebind(inputs, outputs)
    assert binding.inputs["jets"] is first_inputs
    assert binding.outputs["tags"] is first_outputs
    assert binding.rows == {"n": 5}


@dataclass(frozen=True)
class InUse:
    """A binding of 7 rows, which another thread is using until `finish` is called."""

    session: Session
    binding: Binding
    finish: Callable[[], None]


@pytest.fixture(params=["plain", "ranged", "checked"])
def in_use(request: pytest.FixtureRequest) -> Iterator[InUse]:
    inside, leave = threading.Event(), threading.Event()

    def wait(arguments: Sequence[torch.Tensor]) -> None:
        inside.set()
        leave.wait(60)  # so that a use that waits, instead of being refused, ends too

    slow = rogues.Calls(wait)
    signature = mlp_signature(100, (), 2)
    session = {
        "plain": Session(signature, slow),
        "ranged": Session(signature, RangedExecutable([(6, Records())], slow)),
        "checked": CheckedSession(signature, slow, Records(), {"probabilities": ANYTHING}),
    }[request.param]
    binding = session.bind(jets(5, 50), tags(5, 50))
    binding.resize(7)
    other = threading.Thread(target=binding)

    def finish() -> None:
        leave.set()
        other.join()

    other.start()
    try:
        assert inside.wait(60)
        yield InUse(session, binding, finish)
    finally:
        finish()


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda session, binding: binding(), id="call"),
        pytest.param(lambda session, binding: session.run_many([binding]), id="run_many"),
        pytest.param(lambda session, binding: binding(8), id="call with rows"),
        pytest.param(lambda session, binding: binding.resize(8), id="resize"),
        pytest.param(lambda session, binding: binding.rebind(jets(), tags()), id="rebind"),
    ],
)
def test_two_threads_on_one_binding_are_refused(
    in_use: InUse, use: Callable[[Session, Binding], object]
) -> None:
    with pytest.raises(RunError, match="another thread is using this binding"):
        use(in_use.session, in_use.binding)
    in_use.finish()
    assert in_use.binding.rows == {"n": 7}
    in_use.binding.rebind(jets(6), tags(6))
    assert in_use.binding.rows == {"n": 6}


def test_a_binding_is_free_again_after_its_call(in_use: InUse) -> None:
    in_use.finish()
    in_use.binding.rebind(jets(6), tags(6))
    assert in_use.binding.rows == {"n": 6}


# -- windows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 32, 96])
def test_windows_that_keep_the_alignment_are_bound(start: int) -> None:
    binding = SESSION.bind(jets(200).window(start, start + 5), tags(300).window(64, 69))
    binding()
    binding.rebind(jets(40).window(32, 37), tags())
    with pytest.raises(BindError, match="n = 6 is outside"):
        binding(6)


def test_other_windows_are_bound_where_validation_has_tried_them() -> None:
    window = jets(200).window(10, 15)
    message = refusal(window, tags())
    assert "row 10" in message
    assert "multiple of 32" in message
    binding = SESSION.bind(jets(), tags())
    with pytest.raises(BindError, match="row 10"):
        binding.rebind(window, tags())
    free = Session(mlp_signature(100, (), 2), Records(), any_start=True)
    free.bind(window, tags(300).window(7, 12))()
    assert "row 7" in refusal(jets(), tags(300).window(7, 12))


def test_separate_columns_begin_at_any_row() -> None:
    signature = simple(
        Layout(floats("a"), storage="columns"), Layout(floats("x"), storage="columns")
    )
    session = Session(signature, Records())
    for start in range(34):  # beyond the 32 float32 of 128 bytes
        inputs, outputs = session.collection("i", 50), session.collection("o", 50)
        session.bind(inputs.window(start, start + 5), outputs.window(start + 1, start + 6))()


def test_windows_of_one_memory_may_not_overlap() -> None:
    layout = Layout(floats("xy"))
    both = Signature.build(
        {"i": layout, "o": layout},
        [Block("features", "i", ("x",))],
        [Block("y", "o", ("x",))],
        {"n": RowRange(0, 10)},
    )
    session, memory = Session(both, Records(), any_start=True), Collection(layout, 50)
    session.bind(memory.window(0, 10), memory.window(10, 20))
    assert "overlap" in refusal(memory.window(0, 10), memory.window(9, 19), session)


@pytest.mark.parametrize("storage", ["columns", "buffer"])
def test_what_was_copied_is_no_output(storage: Any) -> None:
    layout = Layout(floats("x"), storage=storage)
    session = Session(simple(Layout(floats("a")), layout), Records(), any_start=True)
    copied = as_collection({"x": np.zeros(10, "f4")[::2]}, layout)
    for view in (copied, copied.window(1, 4), copied.rows(3), copied.window(1, 4).rows(2)):
        message = refusal(Collection(Layout(floats("a")), view.n), view, session)
        assert "read-only" in message
        assert "as_collection copied x" in message
        with pytest.raises(ValueError, match="read-only"):
            view["x"][:] = 1


ORIGIN = Origin("jets", "3", None, "cpu/x86-64-v3", "aoti")


def test_sessions_and_bindings_show_their_version_and_collections() -> None:
    session = Session(mlp_signature(100, (), 2), Records(), origin=ORIGIN)
    for shown in (repr(session), repr(session.bind(jets(), tags()))):
        for word in ("jets/3", "aoti", "cpu/x86-64-v3", "tags"):
            assert word in shown


def test_a_binding_shows_its_bound_rows() -> None:
    binding = SESSION.bind(jets(), tags())
    binding.resize(3)
    binding(4)  # for this call alone
    assert "n=3" in repr(binding)
