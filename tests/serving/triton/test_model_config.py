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
GROUP = model_config_pb2.ModelInstanceGroup


def service(signature: Signature, **fields: Any) -> Service:
    """Version 3 of a model, for the CPU and merged if that is possible, but for the fields."""
    defaults: dict[str, Any] = {"merge": mergeable(signature), "target": CPU}
    return Service("model", 3, "d" * 64, signature=signature, **(defaults | fields))


def parsed(described: Service) -> Any:
    """The text of the configuration, as Triton reads it."""
    return text_format.Parse(config_text(described), model_config_pb2.ModelConfig())


@settings(max_examples=settings().max_examples * 3 // 5)
@given(
    st.data(), st.integers(1, 4), st.integers(0, 1000), st.sets(st.integers(1, 400)),
    st.sampled_from(FORMS),
)  # fmt: skip
def test_a_configuration_is_read_back_as_it_was_meant(
    data: st.DataObject, instances: int, delay: int, preferred: set[int], form: Form
) -> None:
    signature = data.draw(problems(one_dtype=form != "columns")).signature
    dtypes = {column.dtype for layout in signature.layouts.values() for column in layout.columns}
    assume(dtypes <= set(TRITON_DTYPES))
    try:
        wire = Wire.of(signature, form)
    except ServingError:
        assume(False)
    merge = mergeable(signature) and form != "blocks"
    described = service(
        signature, instances=instances, queue_delay_us=delay, preferred=tuple(sorted(preferred)),
        requests=form, merge=merge,
    )  # fmt: skip
    config = parsed(described)
    assert config == config_message(described)
    require_tensors(config, wire, merge)
    assert config.max_batch_size == (100 if merge else 0)
    assert config.HasField("dynamic_batching") == merge
    possible = sorted(rows for rows in preferred if rows <= 100) if merge else []
    assert list(config.dynamic_batching.preferred_batch_size) == possible
    (group,) = config.instance_group
    assert (group.count, group.kind) == (instances, GROUP.KIND_CPU)
    assert list(config.version_policy.specific.versions) == [3]
    assert config.parameters["requests"].string_value == form
    assert config.parameters["digest"].string_value == "d" * 64
    for warmup in config.model_warmup:
        assert set(warmup.inputs) == {tensor.name for tensor in wire.inputs}
        assert all(extent > 0 for entry in warmup.inputs.values() for extent in entry.dims)
        assert warmup.batch_size <= config.max_batch_size


def require_tensors(config: Any, wire: Wire, merge: bool) -> None:
    """The names, dtypes and shapes of the configuration are those that travel."""
    names = [tensor.name for tensor in (*wire.inputs, *wire.outputs)]
    assert len(set(names)) == len(names)
    for tensors, entries in ((wire.inputs, config.input), (wire.outputs, config.output)):
        assert [tensor.name for tensor in tensors] == [entry.name for entry in entries]
        for tensor, entry in zip(tensors, entries, strict=True):
            assert model_config_pb2.DataType.Name(entry.data_type) == f"TYPE_{tensor.datatype}"
            shape = [-1, *entry.dims] if merge else list(entry.dims)  # Triton adds the batch
            assert shape == list(tensor.shape(-1))
            assert tensor.scalar or shape.count(-1) == 1


def test_each_gpu_has_a_group_of_instances() -> None:
    config = parsed(service(served.MIXED, target="cuda/sm_90", devices=("cuda:0", "cuda:2")))
    groups = [(group.kind, list(group.gpus), group.count) for group in config.instance_group]
    assert groups == [(GROUP.KIND_GPU, [0], 1), (GROUP.KIND_GPU, [2], 1)]


@pytest.mark.parametrize(
    ("fields", "forced"),
    [({}, "yes"), ({"target": "cuda/sm_90", "devices": ("cuda:0",)}, "no")],
    ids=["cpu", "gpu"],
)
def test_inputs_are_copied_to_the_host_for_a_cpu_alone(fields: dict[str, Any], forced: str) -> None:
    parameters = parsed(service(served.MIXED, **fields)).parameters
    assert parameters["FORCE_CPU_ONLY_INPUT_TENSORS"].string_value == forced


def test_rows_of_several_dimensions_are_not_batched() -> None:
    config = parsed(service(served.EVENT))
    assert config.max_batch_size == 0
    assert not config.HasField("dynamic_batching")
    assert {entry.name: list(entry.dims) for entry in config.input} == {
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
def test_a_service_that_cannot_be_is_refused(mistake: str) -> None:
    fields, message = MISTAKES[mistake]
    with pytest.raises(ServingError, match=message):
        service(**{"signature": served.MIXED, **fields})
