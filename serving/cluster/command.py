"""How a container starts Triton on the repository in its volume."""

from __future__ import annotations

from serving.cluster.needs import Plan
from serving.cluster.proxy import SERVER_OPTION

HTTP, GRPC, METRICS = 8000, 8001, 8002
READY = "/v2/health/ready"
EXECUTABLE = "/opt/tritonserver/bin/tritonserver"
EXIT_S = 45  # for requests under way; Kubernetes' own patience must be longer


def arguments(plan: Plan) -> list[str]:
    """This model alone, whatever else lies in the repository, and as its config says."""
    return [
        f"--model-repository={plan.storage.folder}",
        "--model-control-mode=explicit",
        f"--load-model={plan.model}",
        "--disable-auto-complete-config",
        f"--http-port={HTTP}",
        f"--grpc-port={GRPC}",
        f"--metrics-port={METRICS}",
        f"--exit-timeout-secs={EXIT_S}",
        SERVER_OPTION,
    ]
