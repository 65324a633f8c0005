"""CMS's form of a site: site-local-config.xml.

What CMS says of it: the file is `$SITECONFIG_PATH/JobConfig/site-local-config.xml`, with one
`<site name=...>` in `<site-local-config>`, settings as elements whose values are attributes
(FWCore/Services/test/sitelocalconfig/full/site-local-config.xml in cms-sw/cmssw;
https://twiki.cern.ch/twiki/bin/view/CMSPublic/SiteConfInGitlab).

CMSSW reads no inference server from it. Its TritonService takes servers from Python, a VPSet of
name, address, port, useSsl, rootCertificates, privateKey and certificateChain, and one from the
variables SONIC_LOCAL_BALANCER_HOST and SONIC_LOCAL_BALANCER_PORT, which it calls "temporary
solution, to be replaced with entry in site-local-config.xml or similar"
(HeterogeneousCore/SonicTriton/src/TritonService.cc). Both are read here; in the file the servers
stand in an element of our own, with the names of that VPSet:

    <site-local-config>
      <site name="T2_XX_Somewhere">
        <inference-servers>
          <server name="gpu" address="gpu.somewhere" port="8001" metricsPort="8002"/>
          <fallback enable="true"/>
        </inference-servers>
      </site>
    </site-local-config>

CMS's own elements are passed over. A document type is refused, so no entity is ever expanded.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any
from xml.parsers import expat

from pipeline.config.wording import did_you_mean
from pipeline.config.yaml_lines import Key
from pipeline.errors import ConfigError
from serving.client import address_of
from serving.errors import ServingError
from soa.files import read_plain

SERVERS = "inference-servers"
_BALANCER = "SONIC_LOCAL_BALANCER"
_PARENTS = ("site-local-config", "site")
_DEEPEST = 100
_KEYS = {
    "server": (
        ("name", "address", "port"),
        ("metricsPort", "preference", "compression", "useSsl", "rootCertificates", "privateKey",
         "certificateChain"),
    ),
    "fallback": ((), ("enable",)),
    "policy": (
        (),
        ("deadline", "attempt", "health", "queueMicroseconds", "inFlight", "allowNan"),
    ),
}  # fmt: skip
_TLS = {
    "rootCertificates": "root_certificates",
    "privateKey": "private_key",
    "certificateChain": "certificate_chain",
}
_POLICY = {
    "deadline": "deadline_s",
    "attempt": "attempt_s",
    "health": "health_s",
    "queueMicroseconds": "queue_us",
    "inFlight": "in_flight",
    "allowNan": "allow_nan",
}


def balancer(environment: Mapping[str, str]) -> list[dict[str, Any]]:
    """The server that CMS's variables name, if they do; raises ConfigError for half of it."""
    host, port = (environment.get(f"{_BALANCER}_{part}", "") for part in ("HOST", "PORT"))
    if not host and not port:
        return []
    url = f"triton://{host}:{port}"
    try:
        address_of(url)
    except ServingError:
        raise ConfigError(
            f"{_BALANCER}_HOST is {host!r} and {_BALANCER}_PORT {port!r}: set both, to a host and "
            "a port, or neither"
        ) from None
    return [{"name": _BALANCER, "url": url}]


def read_xml(source: Path) -> tuple[dict[str, Any], dict[Key, int]]:
    """The file as the data of a `Site`, and the line of each key; raises ConfigError."""
    try:
        text = read_plain(source, links=True)
    except OSError as error:
        raise ConfigError(f"{source}: cannot be read: {error.strerror or error}") from None
    reader = _Reader(source)
    try:
        reader.parser.Parse(text, True)
    except expat.ExpatError as error:
        what = expat.ErrorString(error.code)
        raise ConfigError(f"{source}:{error.lineno}: not XML: {what}") from None
    if reader.data.get("site") is None:
        raise ConfigError(f"{source}:1: no <site> in <site-local-config>")
    if reader.problems:
        raise ConfigError(*reader.problems)
    return reader.data, reader.lines


class _Reader:
    def __init__(self, source: Path) -> None:
        self.source = source
        self.data: dict[str, Any] = {"servers": []}
        self.lines: dict[Key, int] = {(): 1}
        self.problems: list[str] = []
        self._open: list[str] = []
        self._once: set[str] = set()
        self.parser = expat.ParserCreate()
        self.parser.StartElementHandler = self._begin
        self.parser.EndElementHandler = lambda name: self._open.pop()
        self.parser.StartDoctypeDeclHandler = self._doctype

    def _doctype(self, *_: object) -> None:
        raise ConfigError(f"{self._here()}: a document type is not allowed: remove <!DOCTYPE>")

    def _begin(self, name: str, attributes: dict[str, str]) -> None:
        at = tuple(self._open)
        self._open.append(name)
        if len(self._open) > _DEEPEST:
            raise ConfigError(f"{self._here()}: more than {_DEEPEST} elements inside one another")
        if not at and name != _PARENTS[0]:
            raise ConfigError(f"{self._here()}: found <{name}>; the root is <{_PARENTS[0]}>")
        if at == _PARENTS[:1] and name == "site":
            if "site" in self.data:
                raise ConfigError(f"{self._here()}: a second <site>; one is allowed")
            self.data["site"] = attributes.get("name", "")
        elif at == (*_PARENTS, SERVERS):
            self._part(name, attributes)
        elif SERVERS in at:
            self._refuse(f"<{name}> inside <{at[-1]}>; put it into <{SERVERS}>")
        elif name == SERVERS:
            if at != _PARENTS:
                self._refuse(f"<{SERVERS}> outside of <site>; put it there")
            elif attributes:
                self._refuse(f"<{name}>: unknown {min(attributes)!r}; it has no attributes")
        elif at == _PARENTS and (hint := did_you_mean(name, (SERVERS,))):
            self._refuse(f"unknown <{name}>{hint}")

    def _part(self, name: str, found: dict[str, str]) -> None:
        if name not in _KEYS:
            self._refuse(
                f"unknown <{name}>{did_you_mean(name, _KEYS)}; allowed: {', '.join(_KEYS)}"
            )
            return
        needed, more = _KEYS[name]
        allowed = (*needed, *more)
        for key in sorted(found.keys() - set(allowed)):
            hint = did_you_mean(key, allowed)
            self._refuse(f"<{name}>: unknown {key!r}{hint}; allowed: {', '.join(allowed)}")
        missing = [key for key in needed if key not in found]
        if missing:
            self._refuse(f"<{name}>: {missing[0]!r} is missing")
            return
        line = self.parser.CurrentLineNumber
        if name in self._once:
            self._refuse(f"a second <{name}>; one is allowed")
            return
        if name != "server":
            self._once.add(name)
        if name == "server":
            self.lines[("servers", len(self.data["servers"]))] = line
            self.data["servers"].append(self._server(found))
        elif name == "fallback":
            self.lines[("local",)] = line
            enable = found.get("enable", "true")
            self.data["local"] = {"fall_back": self._flag("fallback", "enable", enable)}
        else:
            self.lines[("policy",)] = line
            self.data["policy"] = {
                _POLICY[key]: self._flag("policy", key, value)
                if key == "allowNan"
                else self._number("policy", key, value)
                for key, value in found.items()
                if key in _POLICY
            }

    def _server(self, found: dict[str, str]) -> dict[str, Any]:
        host = found["address"]
        server: dict[str, Any] = {
            "name": found["name"],
            "url": f"triton://{host}:{found['port']}",
        }
        if "metricsPort" in found:
            server["metrics"] = f"http://{host}:{found['metricsPort']}/metrics"
        if "preference" in found:
            server["preference"] = self._number("server", "preference", found["preference"])
        if "compression" in found:
            server["compression"] = found["compression"] or "none"
        # CMSSW writes these as empty strings where there are none.
        tls = {ours: found[theirs] for theirs, ours in _TLS.items() if found.get(theirs)}
        if self._flag("server", "useSsl", found.get("useSsl", "false")):
            server["tls"] = tls
        elif tls:
            self._refuse('<server>: certificates without useSsl="true"')
        return server

    def _flag(self, element: str, key: str, value: str) -> bool:
        if value.lower() not in ("true", "false"):
            self._refuse(f"<{element}>: {key}: found {value!r}; expected true or false")
        return value.lower() == "true"

    def _number(self, element: str, key: str, value: str) -> float | int | None:
        try:
            return int(value)
        except ValueError:
            pass
        try:
            return float(value)
        except ValueError:
            self._refuse(f"<{element}>: {key}: found {value!r}; expected a number")
            return None

    def _here(self) -> str:
        return f"{self.source}:{self.parser.CurrentLineNumber}"

    def _refuse(self, text: str) -> None:
        self.problems.append(f"{self._here()}: {text}")
