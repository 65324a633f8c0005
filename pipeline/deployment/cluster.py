"""Deploy to a cluster: writes values for the SuperSONIC chart, and Kubernetes manifests."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from pipeline.deployment.repository import Deployed
from registry.bundle import write_atomically
from serving.cluster import (
    FILES,
    ClusterOptions,
    Needs,
    helm_values,
    manifests,
    needs_of,
    remarks,
    schema_reader,
)
from serving.errors import ServingError
from soa.files import write_whole


@dataclass(frozen=True)
class ClusterFiles:
    """The files to write for a cluster: `helm` is a path of a file, `manifests` of a folder."""

    wanted: ClusterOptions
    helm: Path | None = None
    manifests: Path | None = None
    replace: bool = False

    def check(self) -> None:
        """Raise ServingError if these files cannot be written. To be called before any work."""
        if self.helm is not None:
            schema_reader()
            if self.helm.exists() and not (self.replace and self.helm.is_file()):
                raise _there(self.helm)
        folder = self.manifests
        if folder is not None and folder.exists():
            if not (self.replace and folder.is_dir()):
                raise _there(folder)
            if others := sorted({each.name for each in folder.iterdir()} - set(FILES)):
                raise ServingError(f"{folder} holds {others[0]}, which is no manifest of ours")

    def write(self, deployed: Deployed) -> list[str]:
        """Write the files for a deployed model. Returns lines for people. Raises ServingError."""
        planned = needs_of(deployed.service, deployed.bundle, self.wanted)
        said = []
        if self.helm is not None:
            _write(self.helm, _head(planned) + _yaml(helm_values(planned)))
            said += [f"values for the SuperSONIC chart are in {self.helm}", *remarks(planned)]
        if self.manifests is not None:
            with write_atomically(self.manifests, replace=self.replace) as partial:
                for name, objects in manifests(planned).items():
                    (partial / name).write_text(_yaml(*objects))
            said.append(f"manifests are in {self.manifests}: kubectl apply -f {self.manifests}")
        return said


def _there(path: Path) -> ServingError:
    return ServingError(f"{path} exists already: remove it, or replace it with --replace")


def _yaml(*documents: object) -> str:
    return yaml.safe_dump_all(documents, sort_keys=False, width=100)


def _head(planned: Needs) -> str:
    return (
        f"# {planned.version}, written by `pipeline deploy` for fastml/supersonic 0.2-0.3.\n"
        f"# Install under this name only: helm install {planned.name} fastml/supersonic -f FILE\n"
    )


def _write(path: Path, text: str) -> None:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise ServingError(f"cannot write {path}: {error.strerror}") from None
