"""Deploys to a cluster: writes values for SuperSONIC, a Helm chart that runs Triton servers."""

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
    """What to write for a cluster: values for the SuperSONIC chart, into the file `helm`.

    `wanted`: the options of the cluster that the user chose. `replace`: an existing file may be
    replaced.
    """

    wanted: ClusterOptions
    helm: Path
    replace: bool = False

    def check(self) -> None:
        """Raise ServingError if the file exists and may not be replaced. Call this before any work,
        which would else be lost."""
        if self.helm.exists() and not (self.replace and self.helm.is_file()):
            raise ServingError(
                f"{self.helm} exists already: remove it, or replace it with --replace"
            )

    def write(self, deployed: Deployed) -> list[str]:
        """Write the file for a deployed model. Returns lines to print: where the file is, and
        remarks on its values. Raises ServingError if it cannot be written."""
        needs = needs_of(deployed.service, deployed.bundle, self.wanted)
        values = yaml.safe_dump(helm_values(needs), sort_keys=False, width=100)
        _write_file(self.helm, _header_comment(needs) + values)
        return [f"values for the SuperSONIC chart are in {self.helm}", *remarks(needs)]


def _header_comment(needs: Needs) -> str:
    """Return the first lines of the file, which are YAML comments: the version that the values are
    for, and the command that installs them."""
    return (
        f"# {needs.version}, written by `pipeline deploy` for fastml/supersonic 0.3.\n"
        f"# Install under this name only: helm install {needs.name} fastml/supersonic -f FILE\n"
    )


def _write_file(path: Path, text: str) -> None:
    """Write a file, and make the folders above it. ServingError if a folder or the file cannot be
    written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, text)
    except OSError as error:
        raise ServingError(f"cannot write {path}: {error.strerror}") from None
