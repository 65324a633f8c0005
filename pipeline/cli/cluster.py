"""The options of `pipeline deploy` that are about a cluster."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click
from click.core import ParameterSource

from pipeline.cli.options import F

if TYPE_CHECKING:
    from pipeline.deployment import ClusterFiles


def cluster_options(command: F) -> F:
    """They arrive together, as `**cluster`: `cluster_files` reads them."""
    for option in reversed((
        click.option(
            "--helm", is_flag=False, flag_value="values.yaml", metavar="[FILE]",
            type=click.Path(dir_okay=False, path_type=Path),
            help="Also write values for the SuperSONIC Helm chart. Default FILE: values.yaml.",
        ),
        click.option(
            "--manifests", metavar="DIR", type=click.Path(file_okay=False, path_type=Path),
            help="Also write plain Kubernetes manifests into the new folder DIR.",
        ),
        click.option(
            "--image", metavar="IMAGE",
            help="For a cluster: a container image with Triton, torch and soa-pipeline.",
        ),
        click.option(
            "--models", default="pvc:models", show_default=True, metavar="PLACE",
            help="For a cluster: where DIR will lie: pvc:CLAIM[/FOLDER], nfs:HOST:/FOLDER, "
            "/cvmfs/FOLDER.",
        ),
        click.option(
            "--servers", default="1-10", show_default=True, metavar="LEAST-MOST",
            help="For a cluster: how many servers there may be.",
        ),
        click.option(
            "--queue-ms", type=int,
            help="For a cluster: more servers where requests wait longer. Default: four runs.",
        ),
        click.option(
            "--memory-gib", type=int,
            help="For a cluster: memory of a server. Default: estimated from the artifact.",
        ),
        click.option(
            "--prometheus", metavar="URL",
            help="For a cluster: a Prometheus that is there. Default: one of its own.",
        ),
        click.option(
            "--connections-per-s", type=int, default=100, show_default=True,
            help="For a cluster: new clients that the proxy lets in.",
        ),
    )):  # fmt: skip
        command = option(command)
    return command


def cluster_files(
    *,
    helm: Path | None,
    manifests: Path | None,
    image: str | None,
    servers: str,
    replace: bool,
    **rest: Any,
) -> ClusterFiles | None:
    """What was asked for, checked; None where nothing was. Raises ServingError."""
    if helm is None and manifests is None:
        for name in ("image", "servers", *rest):
            source = click.get_current_context().get_parameter_source(name)
            if source is ParameterSource.COMMANDLINE:
                option = name.replace("_", "-")
                raise click.UsageError(f"--{option} is for a cluster: add --helm or --manifests")
        return None
    from pipeline.deployment import ClusterFiles
    from serving.cluster import ClusterOptions

    if image is None:
        raise click.UsageError("a cluster needs --image: one with Triton, torch and soa-pipeline")
    least, _, most = servers.partition("-")
    if not (least.isdecimal() and (most or least).isdecimal()):
        raise click.UsageError(f"--servers {servers!r}: write LEAST-MOST, as 1-10")
    wanted = ClusterOptions(image, min_servers=int(least), max_servers=int(most or least), **rest)
    files = ClusterFiles(wanted, helm, manifests, replace)
    files.check()
    return files
