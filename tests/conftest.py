"""What all tests share: markers that skip by themselves, and hypothesis without a clock."""

from __future__ import annotations

from typing import TYPE_CHECKING

import hypothesis
import pytest

if TYPE_CHECKING:  # torch takes seconds to import, and many runs select a test without it
    from tests.models.building import Built

# No test may fail because a machine is slow or busy.
hypothesis.settings.register_profile("soa", deadline=None)
hypothesis.settings.load_profile("soa")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    on_gpu = [item for item in items if item.get_closest_marker("cuda")]
    if not on_gpu:
        return
    import torch  # only now: it takes seconds, and few runs select a GPU test

    if not torch.cuda.is_available():
        for item in on_gpu:
            item.add_marker(pytest.mark.skip(reason="torch sees no CUDA device"))


@pytest.fixture(scope="session")
def mlp(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A model whose first operation is pointwise, compiled once for every engine."""
    from tests.models import building, mlps

    signature = building.mlp_signature(5000, (1000, 4099))
    return building.build(mlps.PointwiseFirst(), signature, tmp_path_factory.mktemp("mlp"))
