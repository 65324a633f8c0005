"""Binding refuses all memory whose faults an artifact itself would not notice."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
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


def simple(given: Layout, answers: Layout = TAGS) -> Signature:
    """Reads the first column and writes `x`; one collection if both layouts are the same."""
    out = "i" if given is answers else "o"
    return Signature.build(
        {"i": given, out: answers},
        [Block("features", "i", (given.columns[0].name,))],
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
    with pytest.raises(BindError) as caught:
        session.bind(inputs, outputs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def jets(n: int = 5, capacity: int | None = None) -> Collection:
    return Collection(JETS, n, capacity=capacity)


def tags(n: int = 5, capacity: int | None = None) -> Collection:
    return Collection(TAGS, n, capacity=capacity)


# -- layouts ---------------------------------------------------------------------------------------


def test_swapped_collections_and_names_that_are_not_there() -> None:
    with pytest.raises(BindError, match=r"'jets' has the layout of 'tags': are they swapped\?"):
        SESSION.bind(tags(), jets())
    for ask in (SESSION.layout, lambda name: SESSION.collection(name, 5)):
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
def test_layouts_that_are_not_the_models(layout: Layout, message: str) -> None:
    assert refusal(Collection(layout, 5), tags()).startswith(f"collection 'jets'{message}")


@pytest.mark.parametrize("name", "abcdef")
def test_every_column_of_a_layout_counts(name: str) -> None:
    columns = [column(each, "int32" if each == name else "float32") for each in "abcdef"]
    assert refusal(Collection(Layout(columns), 5), tags()) == (
        f"collection 'jets': column '{name}' is int32, the model was compiled for float32"
    )


def test_an_eigen_column_of_another_shape() -> None:
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
def test_what_is_no_collection_of_the_model(inputs: Any, message: str) -> None:
    assert refusal(inputs, tags()).startswith(message)


def test_one_collection_where_the_model_has_several() -> None:
    session = Session(detector.signature(), Records())
    text = refusal(Collection(detector.HITS, 1), {}, session)
    assert text == "the model has input collections hits, arrow, packed, pairs: give a dict"
    text = refusal(jets(), {"jets": jets()})
    assert text == "output collections jets given, the model has tags"


def test_another_device() -> None:
    elsewhere = Session(mlp_signature(), Records(), "meta")
    assert refusal(jets(), tags(), elsewhere) == (
        "collection 'jets' lies on cpu, the session runs on meta: load the model on the device "
        "where the data is"
    )


def test_read_only_memory_is_an_input_only() -> None:
    assert refusal(jets(), tags().locked()) == "output collection 'tags' is read-only memory"
    SESSION.bind(jets().locked(), tags())


# -- row counts ------------------------------------------------------------------------------------


def test_rows_that_differ() -> None:
    assert refusal(jets(5), tags(6)) == (
        "collection 'tags' has 6 rows, 'jets' has 5: both are rows of 'n'"
    )


@pytest.mark.parametrize("n", [0, 1, 101])
def test_rows_outside_the_compiled_range(n: int) -> None:
    refused = refusal(jets(n), tags(n))
    assert refused.startswith(f"n = {n} is outside the compiled range 2 … 100: ")
    assert "rows: unbounded" in refused


@pytest.mark.parametrize("n", [2, 100])
def test_rows_at_the_ends_of_the_compiled_range(n: int) -> None:
    binding = SESSION.bind(jets(n), tags(n))
    binding()
    assert binding.rows == {"n": n}


def test_rows_of_two_dimensions_are_independent() -> None:
    signature = detector.signature()
    session = Session(signature, Records())

    def made(n: int, m: int) -> tuple[dict[str, Collection], dict[str, Collection]]:
        size = {"n": n, "m": m}
        inputs, outputs = (
            {c: session.collection(c, size[signature.rows_of[c]]) for c in names}
            for names in (signature.input_collections, signature.output_collections)
        )
        return inputs, outputs

    binding = session.bind(*made(7, 60))
    assert binding.rows == {"n": 7, "m": 60}
    assert refusal(*made(7, 71), session).startswith("m = 71 is outside the compiled range 0 … 70")
    inputs, outputs = made(7, 60)
    outputs["loose"] = session.collection("loose", 8)
    assert refusal(inputs, outputs, session) == (
        "collection 'loose' has 8 rows, 'hits' has 7: both are rows of 'n'"
    )
    binding({"n": 3, "m": 9})
    assert binding.rows == {"n": 3, "m": 9}
    with pytest.raises(BindError, match=r"rows for \['n'\], this model has \['m', 'n'\]"):
        binding({"n": 3})
    with pytest.raises(BindError, match=r"m = 61 is outside 0 … 60"):
        binding({"n": 3, "m": 61})
    with pytest.raises(BindError, match=r"n = 8 is outside 0 … 7"):
        binding(8)


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
    one, two, three, four = map(shared, offsets)
    session = Session(TWO, Records())
    text = refusal({"in1": one, "in2": two}, {"out1": three, "out2": four}, session)
    assert text == f"collections {names} overlap in memory"


def test_neighbours_do_not_overlap_and_inputs_may() -> None:
    one, two, three, four = map(shared, (0, 0, 384, 768))
    Session(TWO, Records()).bind({"in1": one, "in2": two}, {"out1": three, "out2": four})


# -- what is bound ---------------------------------------------------------------------------------


def test_arguments_are_views_of_the_callers_memory() -> None:
    """Nothing is copied: each argument lies in a collection's memory, also after another n."""
    signature = detector.signature()
    records = Records()
    session = Session(signature, records)
    size = {"n": 7, "m": 5}
    every = {
        name: Collection(layout, size[signature.rows_of[name]], capacity=40)
        for name, layout in signature.layouts.items()
    }
    binding = session.bind(
        {name: every[name] for name in signature.input_collections},
        {name: every[name] for name in signature.output_collections},
    )
    binding()
    binding({"n": 33, "m": 2})
    for call in records.calls:
        for argument, tensor in zip(signature.arguments, call, strict=True):
            if argument.kind == "carrier":
                assert tensor.nbytes == 0
                continue
            assert tensor.is_contiguous()
            assert any(
                piece.data_ptr() <= tensor.data_ptr()
                and tensor.data_ptr() + tensor.nbytes <= piece.data_ptr() + piece.nbytes
                for piece in every[argument.collection].memory()
            ), argument
            start = every[argument.collection].span(argument.column, argument.component).tensor()
            assert tensor.data_ptr() == start.data_ptr()
    shapes = [[tuple(t.shape) for t in call[:3]] for call in records.calls]
    assert shapes == [[(7, 0), (5, 0), (3, 64)], [(33, 0), (2, 0), (3, 64)]]


def test_a_binding_keeps_its_memory_alive(mlp: Built) -> None:
    given, written = mlp.collections({"n": 100})
    expected = given["jets"].memory()[0].clone()
    binding = mlp.session("aoti").bind(given, written)
    binding()
    answer = written["tags"].memory()[0].clone()
    del given, written
    junk = [torch.full((len(expected),), 1, dtype=torch.uint8) for _ in range(100)]
    binding()
    assert torch.equal(binding.inputs["jets"].memory()[0], expected)
    assert torch.equal(binding.outputs["tags"].memory()[0], answer)
    del junk


def test_other_rows_of_the_same_memory_equal_a_fresh_binding(mlp: Built) -> None:
    for name in mlp.files:
        session = mlp.session(name)
        given, written = mlp.collections({"n": 33}, spare=67)
        binding = session.bind(given, written)
        whole, _ = mlp.collections({"n": 100})
        for c in FEATURES:  # all 100 rows hold values; 33 of them are in use
            given["jets"].span(c).tensor().copy_(whole["jets"].span(c).tensor())
        for n in (33, 0, 1, 100, 32, 33):
            for c in CLASSES:
                written["tags"].span(c).tensor().fill_(float("nan"))
            binding(n)
            assert binding.rows == {"n": n}
            fresh = Collection(TAGS, n, capacity=100)
            session.run(given["jets"].rows(n), fresh)
            for c in CLASSES:
                assert torch.equal(written["tags"].span(c).tensor()[:n], fresh.tensor(c)), (name, n)
                assert written["tags"].span(c).tensor()[n:].isnan().all()


@dataclass
class Bound:
    """A binding of 33 rows of memory for 100."""

    session: Session
    binding: Binding
    written: dict[str, Collection]
    given: dict[str, Collection]

    def answered(self, run: Callable[[], object]) -> int:
        """How many rows have answers after `run`. They are the first ones."""
        column = self.written["tags"].span("x").tensor()
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
    given, written = mlp.collections({"n": 33}, spare=67)
    return Bound(session, session.bind(given, written), written, given)


def test_rows_of_a_call_are_for_that_call(of_33: Bound) -> None:
    binding = of_33.binding
    for n in (5, 50, 0):
        assert of_33.answered(lambda n=n: binding(n)) == n  # type: ignore[misc]
        assert of_33.answered(binding) == 33


@pytest.mark.parametrize("threads", [1, 2])
def test_many_bindings_run_on_their_bound_rows(of_33: Bound, threads: int) -> None:
    of_33.binding(5)
    assert of_33.answered(lambda: of_33.session.run_many([of_33.binding], threads)) == 33


def test_resized_rows_stay(of_33: Bound) -> None:
    binding = of_33.binding
    binding.resize(7)
    assert of_33.answered(binding) == 7
    assert of_33.answered(lambda: of_33.session.run_many([binding])) == 7
    assert of_33.answered(lambda: binding(33)) == 33
    assert of_33.answered(binding) == 7


def test_rows_of_other_memory(mlp: Built, of_33: Bound) -> None:
    binding = of_33.binding
    binding.resize(5)
    binding.rebind(*mlp.collections({"n": 11}))
    binding.rebind(of_33.given, of_33.written)
    assert of_33.answered(binding) == 33


@pytest.mark.parametrize("n", [-1, 1, 51, 10**12])
def test_other_rows_beyond_the_memory_or_the_range(n: int) -> None:
    binding = SESSION.bind(jets(5, capacity=50), tags(5, capacity=60))
    with pytest.raises(BindError) as caught:
        binding(n)
    assert str(caught.value) == (
        f"n = {n} is outside 2 … 50 (compiled for up to 100, and the bound memory holds 50)"
    )
    assert binding.rows == {"n": 5}
    roomy = SESSION.bind(jets(5, capacity=500), tags(5, capacity=500))
    roomy(100)
    with pytest.raises(BindError, match="n = 101 is outside 2 … 100"):
        roomy(101)


@pytest.mark.parametrize("rows", [2.5, "7", {"n": None}, [7], True])
def test_what_is_no_row_count(rows: Any) -> None:
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
    for name in mlp.files:
        session = mlp.session(name)
        given, written = mlp.collections({"n": 33})
        binding = session.bind(given, written)
        for n, spare in ((100, 0), (7, 60), (33, 31), (0, 5), (1000, 1)):
            inputs, outputs = mlp.collections({"n": n}, spare)
            _, expected = mlp.collections({"n": n})
            binding.rebind(inputs, outputs)
            binding()
            session.run(mlp.collections({"n": n})[0], expected)
            assert binding.rows == {"n": n}
            for c in CLASSES:
                assert torch.equal(outputs["tags"].tensor(c), expected["tags"].tensor(c)), (name, n)
        assert not written["tags"].memory()[0].any()  # the first memory is not used


def test_memory_that_does_not_fit_leaves_the_binding_as_it_was() -> None:
    session = Session(mlp_signature(100, (), 2), Records())
    given, written = jets(), tags()
    binding = session.bind(given, written)
    short = Collection(Layout(floats("abcde")), 5)
    refused: list[tuple[Any, Any, str]] = [
        (short, tags(), "collection 'jets' has the columns a, b, c, d, e"),
        (jets(5), tags(6), "both are rows of 'n'"),
        ({"tracks": jets()}, tags(), "input collections tracks given"),
    ]
    for inputs, outputs, message in refused:
        with pytest.raises(BindError, match=message):
            binding.rebind(inputs, outputs)
    assert binding.inputs["jets"] is given
    assert binding.outputs["tags"] is written
    assert binding.rows == {"n": 5}


@pytest.mark.parametrize("kind", ["plain", "ranged", "checked"])
def test_two_threads_on_one_binding_are_refused(kind: str) -> None:
    inside, leave = threading.Event(), threading.Event()

    def wait(arguments: Sequence[torch.Tensor]) -> None:
        inside.set()
        leave.wait(60)

    slow = rogues.Calls(wait)

    signature = mlp_signature(100, (), 2)
    session = {
        "plain": Session(signature, slow),
        "ranged": Session(signature, RangedExecutable([(6, Records())], slow)),
        "checked": CheckedSession(signature, slow, Records(), {"probabilities": ANYTHING}),
    }[kind]
    binding = session.bind(jets(5, 50), tags(5, 50))
    binding.resize(7)
    other = threading.Thread(target=binding)
    other.start()
    assert inside.wait(60)
    uses: list[Callable[[], object]] = [
        binding,
        lambda: session.run_many([binding]),
        lambda: binding(8),
        lambda: binding.resize(8),
        lambda: binding.rebind(jets(), tags()),
    ]
    for use in uses:
        with pytest.raises(RunError, match="another thread is using this binding"):
            use()
    leave.set()
    other.join()
    assert binding.rows == {"n": 7}
    binding.rebind(jets(6), tags(6))
    assert binding.rows == {"n": 6}


# -- windows ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("start", [0, 32, 96])
def test_windows_that_keep_the_alignment_are_bound(start: int) -> None:
    binding = SESSION.bind(jets(200).window(start, start + 5), tags(300).window(64, 69))
    binding()
    binding.rebind(jets(40).window(32, 37), tags())
    with pytest.raises(BindError, match="n = 6 is outside"):
        binding(6)


def test_other_windows_are_bound_where_validation_has_tried_them() -> None:
    given = jets(200).window(10, 15)
    text = refusal(given, tags())
    assert "row 10" in text and "multiple of 32" in text
    binding = SESSION.bind(jets(), tags())
    with pytest.raises(BindError, match="row 10"):
        binding.rebind(given, tags())
    free = Session(mlp_signature(100, (), 2), Records(), any_start=True)
    free.bind(given, tags(300).window(7, 12))()
    assert "row 7" in refusal(jets(), tags(300).window(7, 12))


def test_separate_columns_begin_at_any_row() -> None:
    layout = Layout(floats("a"), storage="columns")
    answers = Layout(floats("x"), storage="columns")
    session = Session(simple(layout, answers), Records())
    for start in range(34):
        given, written = Collection(layout, 50), Collection(answers, 50)
        session.bind(given.window(start, start + 5), written.window(start + 1, start + 6))()


def test_windows_of_one_memory() -> None:
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
    for part in (copied, copied.window(1, 4), copied.rows(3), copied.window(1, 4).rows(2)):
        text = refusal(Collection(Layout(floats("a")), part.n), part, session)
        assert "read-only" in text and "as_collection copied x" in text
        with pytest.raises(ValueError, match="read-only"):
            part["x"][:] = 1


def test_what_sessions_and_bindings_are() -> None:
    origin = Origin("jets", "3", None, "cpu/x86-64-v3", "aoti")
    session = Session(mlp_signature(100, (), 2), Records(), origin=origin)
    binding = session.bind(jets(), tags())
    for made in (session, binding):
        for part in ("jets/3", "aoti", "cpu/x86-64-v3", "tags"):
            assert part in repr(made)
    binding.resize(3)
    binding(4)
    assert "n=3" in repr(binding)
