"""Finds and reads the site file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from pipeline.config.mistakes import validate
from pipeline.config.yaml_lines import Problem, read_yaml
from pipeline.errors import ConfigError
from serving.client import address_of
from serving.errors import ServingError
from serving.site import Site

VARIABLE = "PIPELINE_SITE"
_BALANCER = "SONIC_LOCAL_BALANCER"


def load_site(path: str | Path) -> Site:
    """Read a site file. If it has mistakes, raises a ConfigError that lists all of them, a line for
    each: `file:line: key: found; allowed`."""
    document = read_yaml(Path(path))
    site = validate(document, Site, "site")
    advice = "found nothing; write `tls: {}` for the system's certificates, or leave it off"
    problems: list[Problem] = [
        (("servers", i, "tls"), advice)
        for i, server in enumerate(document.data.get("servers", ()))
        if "tls" in server and server["tls"] is None
    ]
    document.refuse(problems, "site")
    return site


def find_site(environment: Mapping[str, str] = os.environ) -> tuple[Site, Path]:
    """Returns the site of this host, and the folder that its paths are relative to.

    The variable PIPELINE_SITE names the site file. If it is not set, the site is the one server
    that CMSSW's variables SONIC_LOCAL_BALANCER_HOST and SONIC_LOCAL_BALANCER_PORT name
    (HeterogeneousCore/SonicTriton/src/TritonService.cc). Raises ConfigError if these are not set
    either.
    """
    if named := environment.get(VARIABLE):
        return load_site(named), Path(named).parent
    host = environment.get(f"{_BALANCER}_HOST", "")
    port = environment.get(f"{_BALANCER}_PORT", "")
    if not host and not port:
        raise ConfigError(
            f"no site file: set {VARIABLE} to one, or give load(..., site=PATH); see "
            "docs/howto/sites.md"
        )
    url = f"triton://{host}:{port}"
    try:
        address_of(url)
    except ServingError:
        raise ConfigError(
            f"{_BALANCER}_HOST is {host!r} and {_BALANCER}_PORT {port!r}: set both, to a host and "
            "a port, or neither"
        ) from None
    return Site.model_validate({"servers": [{"name": _BALANCER, "url": url}]}), Path()
