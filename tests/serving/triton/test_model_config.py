"""config.pbtxt: it is valid for Triton's own schema, and agrees with the signature."""

from __future__ import annotations

from typing import Any

import pytest
from google.protobuf import text_format
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from tritonclient.grpc import model_config_pb2

from engines.target import Target
from serving.errors import ServingError
from serving.triton.config import Service, config_message, config_text
from serving.wire import FORMS, TRITON_DTYPES, Form, Wire, mergeable
from soa.signature import Signature
from tests.models import served
from tests.models.signatures import problems

CPU = str(Target.parse("cpu"))


def service(signature: Signature, **fields: Any) -> Service:
    given = {"merge": mergeable(signature), "target": CPU, **fields}
    return Service("model", 3, "d" * 64, signature=signature, **given)


def parsed(written: Service) -> Any:
    return text_format.Parse(config_text(written), model_config_pb2.ModelConfig())


@settings(max_examples=settings().max_examples * 3 // 5)
@given(
    st.data(), st.integers(1, 4), st.integers(0, 1000), st.sets(st.integers(1, 400)),
    st.sampled_from(FORMS),
)  # fmt: skip
def test_it_is_read_back_as_it_was_meant(
    data: st.DataObject, instances: int, delay: int, preferred: set[int], form: Form
) -> None:
    signature = data.draw(problems(one_dtype=form != "columns")).signature
    dtypes = [c.dtype for layout in signature.layouts.values() for c in layout.columns]
    assume(all(dtype in TRITON_DTYPES for dtype in dtypes))
    try:
        wire = Wire.of(signature, form)
    except ServingError:
        assume(False)
    merge = mergeable(signature) and form != "blocks"
    written = service(
        signature, instances=instances, queue_delay_us=delay, preferred=tuple(sorted(preferred)),
        requests=form, merge=merge,
    )  # fmt: skip
    config = parsed(written)
    assert config == config_message(written)
    names = [t.name for t in (*wire.inputs, *wire.outputs)]
    assert len(set(names)) == len(names)
    for tensors, entries in ((wire.inputs, config.input), (wire.outputs, config.output)):
        assert [t.name for t in tensors] == [e.name for e in entries]
        for t, entry in zip(tensors, entries, strict=True):
            assert model_config_pb2.DataType.Name(entry.data_type) == f"TYPE_{t.datatype}"
            full = [-1, *entry.dims] if merge else list(entry.dims)
            assert full == list(t.shape(-1)) and (t.scalar or full.count(-1) == 1)
    assert config.max_batch_size == (100 if merge else 0)
    assert config.HasField("dynamic_batching") == merge
    kept = sorted(rows for rows in preferred if rows <= 100) if merge else []
    assert list(config.dynamic_batching.preferred_batch_size) == kept
    assert [(g.count, g.kind) for g in config.instance_group] == [
        (instances, model_config_pb2.ModelInstanceGroup.KIND_CPU)
    ]
    assert list(config.version_policy.specific.versions) == [3]
    assert config.parameters["requests"].string_value == form
    assert config.parameters["digest"].string_value == "d" * 64
    for warm in config.model_warmup:
        assert set(warm.inputs) == {t.name for t in wire.inputs}
        assert all(extent > 0 for each in warm.inputs.values() for extent in each.dims)
        assert warm.batch_size <= config.max_batch_size


def test_one_group_for_each_gpu() -> None:
    config = parsed(service(served.MIXED, target="cuda/sm_90", devices=("cuda:0", "cuda:2")))
    group = model_config_pb2.ModelInstanceGroup
    assert [(g.kind, list(g.gpus), g.count) for g in config.instance_group] == [
        (group.KIND_GPU, [0], 1),
        (group.KIND_GPU, [2], 1),
    ]
    forced = "FORCE_CPU_ONLY_INPUT_TENSORS"
    assert config.parameters[forced].string_value == "no"
    assert parsed(service(served.MIXED)).parameters[forced].string_value == "yes"


def test_rows_of_several_dimensions_are_not_batched() -> None:
    config = parsed(service(served.EVENT))
    assert config.max_batch_size == 0 and not config.HasField("dynamic_batching")
    assert {e.name: list(e.dims) for e in config.input} == {
        "nodes.x": [-1, 1],
        "nodes.y": [-1, 1],
        "nodes.z": [1],
        "edges.weight": [-1, 1],
    }


MISTAKES: dict[str, tuple[dict[str, Any], str]] = {
    "scalars": ({"signature": served.EVENT, "merge": True}, "never merged"),
    "blocks": (
        {"signature": served.COUPLED, "requests": "blocks", "merge": True},
        r"a block \(F, n\) has its rows last",
    ),
    "device": ({"devices": ("gpu",)}, "device 'gpu': use cpu or cuda:<number>"),
    "target": ({"devices": ("cuda:0",)}, "does not run on device 'cuda:0'"),
    "twice": ({"devices": ("cpu", "cpu")}, "name each one once"),
    "none": ({"devices": ()}, "devices none"),
    "instances": ({"instances": 0}, "at least 1 instance"),
    "delay": ({"queue_delay_us": -1}, "at least 1 instance and 0 us"),
}


@pytest.mark.parametrize("mistake", MISTAKES)
def test_what_cannot_be_served(mistake: str) -> None:
    fields, message = MISTAKES[mistake]
    with pytest.raises(ServingError, match=message):
        service(**{"signature": served.MIXED, **fields})
