from __future__ import annotations

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.site_file import find_site, load_site
from pipeline.errors import ConfigError
from serving.site.options import Site, SiteServer
from tests.pipeline.config import mistakes

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "howto" / "sites.md").read_text()
YAML = re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[0]
"""The site of the page, which has every key."""


def load(folder: Path, text: str) -> Site:
    """The site in a file with this text."""
    path = folder / "site.yaml"
    path.write_text(text)
    return load_site(path)


def refused(folder: Path, text: str) -> list[str]:
    """The problems of a site with this text, as `line: rest`."""
    return mistakes.refused(load_site, folder / "site.yaml", text)


def test_the_page_names_every_key() -> None:
    for key in Site.model_fields:
        assert re.search(rf"^{key}:", YAML, re.MULTILINE), key
    for key in SiteServer.model_fields:
        assert re.search(rf"^(  - |    ){key}:", YAML, re.MULTILINE), key


def test_the_page_has_the_defaults(tmp_path: Path) -> None:
    site, bare = load(tmp_path, YAML), load(tmp_path, "servers: []")
    assert site.policy == bare.policy and site.local == bare.local


def test_the_options_of_the_pages_server(tmp_path: Path) -> None:
    """Files are found from the folder of the site."""
    site = load(tmp_path, YAML)
    options = site.servers[0].options(site.policy, tmp_path)
    assert options.tls is not None and options.tls.root_certificates == tmp_path / "ca.pem"
    assert (options.retries, options.deadline_s) == (0, 2.0)


MISTAKES = [
    ("name: gpu-1", "name: gpu-1\n    weight: 1", 4, "servers[0].weight: unknown key; allowed: na"),
    ("triton://gpu-1.somewhere:8001", "gpu-1:8001", 4, "is not the address of a server: write tr"),
    ("http://gpu-1", "gpu-1", 5, "servers[0].metrics: found 'gpu-1.somewhere:8002/metrics'; write"),
    (
        "certificate_chain: chain.pem",
        "",
        10,
        "servers[0].tls: found one of private_key and certificate_chain; name both, or neither",
    ),
    ("devices: []", "devices: [cpu, cpu]", 1, "site: found the name 'cpu' twice; give each"),
    ("devices: []", "devices: [gpu-1]", 1, "site: found the name 'gpu-1' twice; give each"),
    ("deadline_s: 10.0", "deadline_s: 1.0", 18, "policy: found attempt_s 2 above deadline_s 1"),
    (
        "servers: [gpu-1]",
        "servers: [gpu-2]",
        1,
        "found server 'gpu-2' for model jet-tagger; the",
    ),
]


@pytest.mark.parametrize(("old", "new", "line", "says"), MISTAKES)
def test_a_mistake_in_a_site_is_named_with_its_line(
    tmp_path: Path, old: str, new: str, line: int, says: str
) -> None:
    assert YAML.count(old) == 1, old
    problems = refused(tmp_path, YAML.replace(old, new))
    assert any(p.startswith(f"{line}: ") and says in p for p in problems), problems


def test_an_empty_tls_is_refused_with_the_way_to_write_it(tmp_path: Path) -> None:
    text = "servers:\n  - name: a\n    url: triton://h:1\n    tls:\n"
    (problem,) = refused(tmp_path, text)
    assert problem.startswith("4: servers[0].tls: found nothing; write `tls: {}` for the system's")


TWO = "servers:\n  - {name: a, url: 'triton://h:1'}\n  - {name: %s, url: 'triton://h:%d'}\n"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (TWO % ("a", 2), "1: servers: found the name 'a' twice"),
        (TWO % ("b", 1), "1: servers: found the url 'triton://h:1' twice"),
        ("local: {fall_back: false}", "1: site: found no server, no device and no fall-back; name"),
    ],
)
def test_a_site_that_contradicts_itself_is_refused(tmp_path: Path, text: str, says: str) -> None:
    (problem,) = refused(tmp_path, text)
    assert problem.startswith(says)


def test_a_site_that_does_not_exist_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no\.yaml: cannot be read: No such file"):
        load_site(tmp_path / "no.yaml")


def test_a_site_that_is_no_mapping_is_refused(tmp_path: Path) -> None:
    assert refused(tmp_path, "- a\n")[0].startswith("1: found a list")


@given(st.binary(max_size=300), st.integers(0, 600), st.integers(0, 40))
def test_any_bytes_are_a_site_or_one_typed_error(
    tmp_path_factory: pytest.TempPathFactory, junk: bytes, start: int, cut: int
) -> None:
    """Junk alone, and in the place of `cut` bytes of a good file."""
    path, good = tmp_path_factory.getbasetemp() / "j.yaml", YAML.encode()
    for data in (junk, good[:start] + junk + good[start + cut :]):
        path.write_bytes(data)
        try:
            load_site(path)
        except ConfigError as error:
            assert all(str(path) in p and "\n" not in p for p in error.problems)


CMSSW = {"SONIC_LOCAL_BALANCER_HOST": "balancer", "SONIC_LOCAL_BALANCER_PORT": "8001"}


def test_cmssws_variables_are_a_site_of_one_server() -> None:
    (server,) = find_site(CMSSW)[0].servers
    assert (server.name, server.url) == ("SONIC_LOCAL_BALANCER", "triton://balancer:8001")


def test_a_named_site_is_used_before_cmssws_variables(tmp_path: Path) -> None:
    (tmp_path / "mine.yaml").write_text(YAML)
    site, folder = find_site({"PIPELINE_SITE": str(tmp_path / "mine.yaml"), **CMSSW})
    assert ([server.name for server in site.servers], folder) == (["gpu-1"], tmp_path)


@pytest.mark.parametrize("port", ["", "99999", "x"])
def test_cmssws_variables_without_a_port_are_refused(port: str) -> None:
    with pytest.raises(ConfigError, match=f"_PORT '{port}': set both, to a host and a port"):
        find_site({**CMSSW, "SONIC_LOCAL_BALANCER_PORT": port})


def test_without_a_site_the_variable_to_set_is_named() -> None:
    with pytest.raises(ConfigError, match=r"no site file: set PIPELINE_SITE to one"):
        find_site({})
