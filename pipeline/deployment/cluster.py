"""Deploy to a cluster: writes values for the SuperSONIC chart."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import yaml

from pipeline.deployment.repository import Deployed
from serving.cluster import ClusterOptions, Needs, helm_values, needs_of, remarks
from serving.errors import ServingError
from soa.files import write_whole


@dataclass(frozen=True)
class ClusterFiles:
    """The file to write for a cluster: values for the SuperSONIC chart, at the path `helm`."""

    wanted: ClusterOptions
    helm: Path
    replace: bool = False

    def check(self) -> None:
        """Raise ServingError if the file cannot be written. To be called before any work."""
        if self.helm.exists() and not (self.replace and self.helm.is_file()):
            raise ServingError(
                f"{self.helm} exists already: remove it, or replace it with --replace"
            )

    def write(self, deployed: Deployed) -> list[str]:
        """Write the file for a deployed model. Returns lines for people. Raises ServingError."""
        planned = needs_of(deployed.service, deployed.bundle, self.wanted)
        values = yaml.safe_dump(helm_values(planned), sort_keys=False, width=100)
        _write_file(self.helm, _header_comment(planned) + values)
        return [f"values for the SuperSONIC chart are in {self.helm}", *remarks(planned)]


def _header_comment(planned: Needs) -> str:
    """The first lines of the file, comments in YAML."""
    return (
        f"# {planned.version}, written by `pipeline deploy` for fastml/supersonic 0.3.\n"
        f"# Install under this name only: helm install {planned.name} fastml/supersonic -f FILE\n"
    )


def _write_file(path: Path, text: str) -> None:
    """Write a file, and the folders above it. Raises ServingError."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise ServingError(f"cannot write {path}: {error.strerror}") from None
