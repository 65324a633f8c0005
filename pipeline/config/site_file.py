"""The site file: YAML, or CMS's site-local-config.xml, and where it is found."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from pipeline.config.site_xml import balancer, read_xml
from pipeline.config.wording import reworded
from pipeline.config.yaml_lines import Key, dotted, read_yaml
from pipeline.errors import ConfigError
from serving.site import Site
from soa.options import known_options

VARIABLE = "PIPELINE_SITE"
_CMS = "JobConfig/site-local-config.xml"


@known_options()
def load_site(path: str | Path) -> Site:
    """Read a site file; ConfigError lists every mistake as `file:line: key: found; allowed`."""
    source = Path(path)
    if source.suffix == ".xml":
        data, lines = read_xml(source)
        return _validated(source, data, lines)
    document = read_yaml(source)
    site = _validated(source, document.data, document.lines)
    for i, server in enumerate(document.data.get("servers", ())):
        if "tls" in server and server["tls"] is None:  # meant as TLS, and would be none
            line = document.lines["servers", i, "tls"]
            raise ConfigError(
                f"{source}:{line}: servers[{i}].tls: found nothing; write `tls: {{}}` for the "
                "system's certificates, or leave it off"
            )
    return site


def find_site(environment: Mapping[str, str] = os.environ) -> tuple[Site, Path]:
    """The site of this host and the folder that its paths are relative to.

    PIPELINE_SITE names a file; else it is CMS's, at `$SITECONFIG_PATH/JobConfig/` or
    `$CMS_PATH/SITECONF/local/JobConfig/`; to CMS's, and without any, the server is added that
    CMS's variables name (see `site_xml.balancer`). Raises ConfigError if nothing is found.
    """
    if named := environment.get(VARIABLE):
        return load_site(named), Path(named).parent
    extra = balancer(environment)
    for variable, below in (("SITECONFIG_PATH", ""), ("CMS_PATH", "SITECONF/local")):
        if variable in environment:
            path = Path(environment[variable]) / below / _CMS
            if path.is_file():
                data, lines = read_xml(path)
                data["servers"] += extra
                return _validated(path, data, lines), path.parent
    if extra:
        return Site.model_validate({"servers": extra}), Path()
    raise ConfigError(
        f"no site file: set {VARIABLE} to one (docs/sites.md), or give load(..., site=PATH)"
    )


def _validated(source: Path, data: dict[str, Any], lines: Mapping[Key, int]) -> Site:
    def line(at: Key) -> int:
        while at not in lines:
            at = at[:-1]
        return lines[at]

    try:
        return Site.model_validate(data)
    except ValidationError as error:
        problems = sorted((line(at), dotted(at), text) for at, text in reworded(error, Site, data))
        raise ConfigError(
            *(f"{source}:{number}: {key or 'site'}: {text}" for number, key, text in problems)
        ) from None
