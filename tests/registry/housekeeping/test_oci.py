"""A bundle goes to a real OCI registry and comes back, or is refused with one line."""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import oras.client
import pytest
import urllib3

from registry import BundleError, NotFoundError, RegistryError, TrustError
from registry.bundle import Bundle, PulledNote, open_folder, seal, write_note
from registry.errors import RegistryUnavailableError
from registry.housekeeping import oci, oci_client
from registry.trust import read_trusted, require_signature, sign
from tests.models import oci_server
from tests.models.authorities import certify
from tests.models.bundles import MakeBundle, write_annex
from tests.models.keys import make_keys
from tests.models.oci_server import OciServer, answering, relayed, store_password
from tests.registry.trust.test_signing import standard

pytestmark = pytest.mark.skipif(
    oci_server.PROGRAM is None, reason="no docker-registry: apt install docker-registry"
)
V4 = "cpu/x86-64-v4"


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OciServer]:
    running = OciServer(tmp_path_factory.mktemp("oci") / "server")
    yield running
    running.close()


@pytest.fixture(autouse=True)
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """No password or proxy of this host; a request that fails is repeated once."""
    monkeypatch.setattr(oci_client, "RETRIES", urllib3.Retry(1))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.setenv("NO_PROXY", "*")
    return tmp_path / "home"


@pytest.fixture
def own(tmp_path: Path) -> Iterator[Callable[..., OciServer]]:
    """Starts a server that the test may kill."""
    started: list[OciServer] = []

    def start(**settings: Any) -> OciServer:
        started.append(OciServer(tmp_path / f"server{len(started)}", **settings))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def pulled(make_bundle: MakeBundle) -> Path:
    """A folder as `pull` makes it: with an annex, an empty file, a signature to come, a note."""
    folder = make_bundle()
    bundle = Bundle.open(folder)
    write_annex(folder / "annexes" / V4, bundle, V4)
    write_note(folder, PulledNote("jets/1", bundle.digest, "ada", "2026-01-01T00:00:00+00:00"))
    return folder


def files_of(folder: Path) -> dict[str, bytes]:
    paths = (path for path in folder.rglob("*") if path.is_file())
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in paths}


def beside(folder: Path) -> list[str]:
    """The names of the folder and of temporary ones of it."""
    return sorted(path.name for path in folder.parent.iterdir() if folder.name in path.name)


def sha(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()


@pytest.mark.parametrize("by", ["tag", "digest"])
def test_what_was_pushed_comes_back(
    server: OciServer, pulled: Path, tmp_path: Path, by: str
) -> None:
    tag = f"oci://{server.host}/physics/back-by-{by}:1.0"
    address, bundle = oci.push(pulled, tag)
    name, back = oci.pull(tag if by == "tag" else address, tmp_path / "back")
    assert (name, back.digest) == (address, bundle.digest)
    assert files_of(back.path) == files_of(pulled)
    assert beside(back.path) == ["back"]


def test_a_signature_comes_back(server: OciServer, pulled: Path, tmp_path: Path) -> None:
    keys = make_keys(tmp_path, "release")
    sign(Bundle.open(pulled), keys.private)
    tag = f"oci://{server.host}/physics/signed:1.0"
    oci.push(pulled, tag)
    _, back = oci.pull(tag, tmp_path / "back")
    require_signature(back, [read_trusted(keys.public)])
    other = make_keys(tmp_path, "other")
    with pytest.raises(TrustError):
        require_signature(back, [read_trusted(other.public)])


def test_a_second_push_uploads_no_file(server: OciServer, pulled: Path) -> None:
    tag = f"oci://{server.host}/physics/twice:1.0"
    address, _ = oci.push(pulled, tag)
    before = len(server.asked("PUT"))
    assert oci.push(pulled, tag)[0] == address
    assert [path for path in server.asked("PUT")[before:] if "/manifests/" not in path] == []


def test_the_digest_of_a_file_is_that_of_its_blob(server: OciServer, pulled: Path) -> None:
    oci.push(pulled, f"oci://{server.host}/physics/blobs:1.0")
    for name, digest in open_folder(pulled).files.items():
        assert server.blob(digest).read_bytes() == (pulled / name).read_bytes()


def test_other_programs_read_it(server: OciServer, pulled: Path, tmp_path: Path) -> None:
    """`oras pull` makes the same folder, and `model_signing` verifies its signature."""
    keys = make_keys(tmp_path, "release")
    sign(Bundle.open(pulled), keys.private)
    image = f"{server.host}/physics/read-by-others:1"
    oci.push(pulled, f"oci://{image}")
    folder = tmp_path / "stock"
    oras.client.OrasClient(insecure=True).pull(image, outdir=str(folder))
    assert files_of(folder) == files_of(pulled)

    shutil.move(folder / "bundle.sig", tmp_path / "bundle.sig")
    unsigned = [f"--ignore-paths={folder / name}" for name in ("PROMOTED.json", "annexes")]
    command = ("verify", "key", folder, *unsigned, "--signature", tmp_path / "bundle.sig")
    assert standard(*command, "--public_key", keys.public) == 0
    (folder / "program.pt2").write_bytes(b"other")
    assert standard(*command, "--public_key", keys.public) != 0


def test_an_artifact_is_a_model_of_the_cncf_format(
    server: OciServer, pulled: Path, tmp_path: Path
) -> None:
    sign(Bundle.open(pulled), make_keys(tmp_path, "release").private)  # its signature is a layer
    image = f"{server.host}/physics/cncf:1"
    _, bundle = oci.push(pulled, f"oci://{image}")
    manifest = oras.client.OrasClient(insecure=True).get_manifest(image)
    assert manifest["artifactType"] == "application/vnd.cncf.model.manifest.v1+json"
    assert manifest["config"]["mediaType"] == "application/vnd.cncf.model.config.v1+json"
    config = json.loads(server.blob(manifest["config"]["digest"][7:]).read_bytes())
    assert config["modelfs"]["diffIds"] == [layer["digest"] for layer in manifest["layers"]]
    assert config["descriptor"] == {"name": "jets", "version": bundle.digest}
    kinds = {
        layer["annotations"]["org.cncf.model.filepath"]: layer["mediaType"]
        for layer in manifest["layers"]
    }
    assert kinds["program.pt2"] == "application/vnd.cncf.model.weight.v1.raw"
    assert kinds["reference.safetensors"] == "application/vnd.cncf.model.dataset.v1.raw"


def test_a_pull_takes_one_version_although_the_tag_moves_meanwhile(
    server: OciServer, make_bundle: MakeBundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tag = f"oci://{server.host}/moving:latest"
    address, first = oci.push(make_bundle(seed=1), tag)
    other, pieces = make_bundle(seed=2), oci_client.Repository.read_pieces

    def pieces_after_a_push(*arguments: Any) -> Any:
        oci.push(other, tag)
        return pieces(*arguments)

    with monkeypatch.context() as patch:
        patch.setattr(oci_client.Repository, "read_pieces", pieces_after_a_push)
        name, bundle = oci.pull(tag, tmp_path / "back")
    assert (name, bundle.digest) == (address, first.digest)
    assert oci.pull(tag, tmp_path / "new")[1].digest == Bundle.open(other).digest


# -- breaks ----------------------------------------------------------------------------------------


def large(make_bundle: MakeBundle, mib: int = 2) -> Path:
    """A bundle with a file of some MiB in the middle."""
    folder = make_bundle()
    (folder / "program.pt2").write_bytes(random.Random(0).randbytes(mib << 20))
    seal(folder)
    return folder


def uploads(server: OciServer) -> list[str]:
    """The paths under which files were stored so far."""
    return [path for path in server.asked("PUT") if "/blobs/" in path]


@pytest.mark.parametrize("in_chunks", [False, True])
def test_a_push_that_broke_off_is_completed_by_the_next_one(
    own: Callable[..., OciServer],
    make_bundle: MakeBundle,
    tmp_path: Path,
    in_chunks: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server, folder = own(), large(make_bundle)
    if in_chunks:
        monkeypatch.setattr(oci_client, "IN_CHUNKS", 1 << 20)
    with relayed(server, 1 << 20) as host, pytest.raises(RegistryUnavailableError) as caught:
        oci.push(folder, f"oci://{host}/jets:1")
    assert str(caught.value).startswith(f"oci://{host}/jets: ")
    server.start()
    address = f"oci://{server.host}/jets:1"
    with pytest.raises(NotFoundError, match="there is no 1"):
        oci.pull(address, tmp_path / "back")
    blobs = {*Bundle.open(folder).files.values()}
    assert 0 < len(uploads(server)) < len(blobs)
    oci.push(folder, address)
    assert len(uploads(server)) == len(blobs) + 2  # each once; with SHA256SUMS and the config
    assert files_of(oci.pull(address, tmp_path / "back")[1].path) == files_of(folder)


def test_a_pull_that_broke_off_is_completed_by_the_next_one(
    own: Callable[..., OciServer], make_bundle: MakeBundle, tmp_path: Path
) -> None:
    server, folder, back = own(), large(make_bundle), tmp_path / "back"
    _, bundle = oci.push(folder, f"oci://{server.host}/jets:1")
    with relayed(server, 1 << 20) as host, pytest.raises(RegistryUnavailableError):
        oci.pull(f"oci://{host}/jets:1", back)
    (partial,) = beside(back)
    assert 0 < (back.parent / partial / "program.pt2").stat().st_size < 2 << 20
    server.start()
    earlier = len(server.asked("GET"))
    assert oci.pull(f"oci://{server.host}/jets:1", back)[1].digest == bundle.digest
    assert files_of(back) == files_of(folder)
    assert beside(back) == ["back"]
    requests = " ".join(server.asked("GET")[earlier:])
    assert bundle.files["program.pt2"] in requests
    assert sha((folder / "manifest.json").read_bytes()) not in requests, "it was there already"


@dataclass(frozen=True)
class Pulling:
    """The address of a bundle, the folder to pull it into, and that of a pull that broke off."""

    tag: str
    back: Path
    partial: Path


@pytest.fixture
def pulling(server: OciServer, pulled: Path, tmp_path: Path) -> Pulling:
    tag = f"oci://{server.host}/kept:1"
    address, _ = oci.push(pulled, tag)
    partial = tmp_path / f".back.{address.rpartition(':')[2][:12]}.partial"
    return Pulling(tag, tmp_path / "back", partial)


def test_files_that_were_kept_are_fetched_again_if_their_content_differs(
    pulling: Pulling, pulled: Path
) -> None:
    pulling.partial.mkdir()
    (pulling.partial / "program.pt2").write_bytes(b"x" * 5000)  # the right length
    (pulling.partial / "model.ts").write_bytes(b"x" * 6000)
    assert files_of(oci.pull(pulling.tag, pulling.back)[1].path) == files_of(pulled)


def test_a_file_of_others_among_those_that_were_kept_is_refused(pulling: Pulling) -> None:
    pulling.partial.mkdir()
    (pulling.partial / "more").touch()
    with pytest.raises(BundleError, match="more does not belong to the bundle"):
        oci.pull(pulling.tag, pulling.back)
    assert beside(pulling.back) == []


def test_a_link_in_place_of_the_kept_folder_is_refused(pulling: Pulling, tmp_path: Path) -> None:
    pulling.partial.symlink_to(tmp_path / "elsewhere")
    with pytest.raises((BundleError, OSError)):
        oci.pull(pulling.tag, pulling.back)


def test_a_kept_folder_of_another_user_is_refused(
    pulling: Pulling, monkeypatch: pytest.MonkeyPatch
) -> None:
    pulling.partial.mkdir()
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with pytest.raises(BundleError, match="another user"):
        oci.pull(pulling.tag, pulling.back)


def test_a_folder_that_another_process_is_pulling_is_left_to_it(pulling: Pulling) -> None:
    pulling.partial.mkdir()
    handle = os.open(pulling.partial, os.O_RDONLY)
    fcntl.flock(handle, fcntl.LOCK_EX)
    with pytest.raises(RegistryUnavailableError, match="another process is writing it"):
        oci.pull(pulling.tag, pulling.back)
    os.close(handle)
    assert pulling.partial.is_dir()


def test_a_file_system_without_locks_will_do(
    pulling: Pulling, pulled: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.EBADF, "NFS")

    monkeypatch.setattr(fcntl, "flock", no_locks)
    assert files_of(oci.pull(pulling.tag, pulling.back)[1].path) == files_of(pulled)


def test_a_pull_replaces_no_folder(pulling: Pulling) -> None:
    pulling.back.mkdir()
    with pytest.raises(BundleError, match="exists already"):
        oci.pull(pulling.tag, pulling.back)


# -- hostile content -------------------------------------------------------------------------------


def layer(**fields: Any) -> dict[str, Any]:
    """A layer of a manifest that is right, but for the given fields."""
    return {
        "mediaType": "application/vnd.cncf.model.weight.v1.raw",
        "digest": f"sha256:{sha(b'content')}",
        "size": len(b"content"),
        "annotations": {"org.cncf.model.filepath": "program.pt2"},
    } | fields


def named(*names: str) -> list[dict[str, Any]]:
    return [layer(annotations={"org.cncf.model.filepath": name}) for name in names]


TAR = "application/vnd.cncf.model.weight.v1.tar"
MODEL = {"artifactType": oci.MODEL}


@pytest.mark.parametrize(
    ("manifest", "message"),
    [
        (MODEL | {"layers": named("/etc/x")}, "'/etc/x' is not a relative path"),
        (MODEL | {"layers": named("../up")}, "leaves its folder"),
        (MODEL | {"layers": named("a/../../up")}, "leaves its folder"),
        (MODEL | {"layers": named("a\x1b[2J")}, "is not a relative path with plain"),
        (MODEL | {"layers": named("")}, "is not a relative path"),
        (MODEL | {"layers": named("a", "a/b/c")}, "cannot write .*: (Not a directory|File exists)"),
        (MODEL | {"layers": named("a/b", "a")}, "cannot write .*: Is a directory"),
        (MODEL | {"layers": named(*map(str, range(5000)))}, "5000 files, at most 4096"),
        (MODEL | {"layers": [layer(size=-1)]}, "arrived as"),
        (MODEL | {"layers": [layer(size=True)]}, "a whole number is needed"),
        (MODEL | {"layers": [layer(size=10**18)]}, "arrived as"),
        (MODEL | {"layers": [layer(digest="md5:0")]}, "is not a digest"),
        (MODEL | {"layers": [layer(digest="sha256:../../x")]}, "is not a digest"),
        (MODEL | {"layers": [layer(mediaType=TAR)]}, "SHA256SUMS is missing"),
        (MODEL | {"layers": [layer(annotations={})]}, "is not a relative path"),
        (MODEL | {"layers": [layer(annotations=None)]}, "an object is needed"),
        (MODEL | {"layers": [layer(size=6)]}, r"program\.pt2 arrived as"),
        (MODEL | {"layers": [layer(size=8)]}, r"arrived as"),
        (MODEL | {"layers": [layer(digest=f"sha256:{'0' * 64}")]}, "there is no sha256:0+$"),
        (MODEL | {"layers": [layer()]}, "SHA256SUMS is missing"),
        (MODEL | {"layers": []}, "SHA256SUMS is missing"),
        (MODEL | {"layers": {}}, "a list is needed"),
        (MODEL, "layers: is missing"),
        ({"artifactType": "application/other", "layers": []}, "is not application/vnd"),
        ({"schemaVersion": 2, "manifests": []}, "artifactType: is missing"),
        ([], "an object is needed"),
        ("no json", "not a version that `pipeline push` uploaded"),
        ("[" * 10**5, "nested deeper than"),
    ],
)  # fmt: skip
def test_a_hostile_manifest_is_refused(manifest: Any, message: str, tmp_path: Path) -> None:
    """A registry may give any bytes as a manifest, and any length."""
    text = manifest if isinstance(manifest, str) else json.dumps(manifest)
    back = tmp_path / "back"

    def answer(request: Any) -> oci_server.Answer:
        if "/manifests/" in request.path:
            return 200, {}, text.encode()
        if "/blobs/" in request.path and sha(b"content") not in request.path:
            return 404, {}, b""
        return 200, {}, b"content"

    with answering(answer) as host, pytest.raises(RegistryError, match=message) as caught:
        oci.pull(f"oci://{host}/jets:1", back)
    assert "\n" not in str(caught.value)
    assert "\x1b" not in str(caught.value)
    assert beside(back) == []


def test_a_blob_that_was_altered_is_refused(
    own: Callable[..., OciServer], make_bundle: MakeBundle, tmp_path: Path
) -> None:
    server, folder = own(), make_bundle()
    address, _ = oci.push(folder, f"oci://{server.host}/jets:1")
    content = (folder / "program.pt2").read_bytes()
    for altered in (content[:-1] + bytes([content[-1] ^ 1]), content + b"more", content[:-1]):
        server.blob(sha(content)).write_bytes(altered)
        with pytest.raises(BundleError, match=r"program\.pt2 arrived as sha256") as caught:
            oci.pull(address, tmp_path / "back")
        assert caught.value.code == "bundle-altered"
        assert beside(tmp_path / "back") == []


def teapot(request: Any) -> oci_server.Answer:
    if "/manifests/" in request.path:
        return 418, {}, b'{"errors": [{"code": "TEAPOT", "message": "short"}]}'
    return 200, {}, b""


BAD_ANSWERS: dict[str, Callable[[Any], oci_server.Answer]] = {
    "gave another manifest, sha256": lambda _: (200, {}, b" " * (5 << 20)),
    "another manifest": lambda _: (200, {}, b"{}"),
    "without TLS": lambda _: (302, {"Location": "http://192.0.2.1/"}, b""),
    "HTTP 418 .*short": teapot,
    "HTTP 503": lambda _: (503, {}, b"busy"),
    "broke off|IncompleteRead": lambda _: (200, {"Content-Length": "99"}, b"{"),
}


@pytest.mark.parametrize("message", BAD_ANSWERS)
def test_an_answer_that_is_no_manifest_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, message: str
) -> None:
    monkeypatch.setattr(oci_client, "ANSWER_S", 0.3)
    monkeypatch.setattr(oci_client, "RETRIES", 0)
    with answering(BAD_ANSWERS[message]) as host, pytest.raises(RegistryError, match=message):
        oci.pull(f"oci://{host}/jets@sha256:{'0' * 64}", tmp_path / "back")
    assert beside(tmp_path / "back") == []


def test_an_answer_that_takes_too_long_is_not_waited_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(oci_client, "ANSWER_S", 0.3)
    monkeypatch.setattr(oci_client, "RETRIES", 0)
    release = threading.Event()

    def answer_late(_: Any) -> oci_server.Answer:
        release.wait(5)
        return 200, {}, b""

    with answering(answer_late) as host:
        try:
            with pytest.raises(RegistryError, match="did not answer in time"):
                oci.pull(f"oci://{host}/jets@sha256:{'0' * 64}", tmp_path / "back")
        finally:
            release.set()  # or the server would be waited for
    assert beside(tmp_path / "back") == []


def add_a_link(folder: Path) -> None:
    (folder / "link").symlink_to("/etc/passwd")


def alter_a_file(folder: Path) -> None:
    (folder / "program.pt2").write_bytes(b"other")


@pytest.mark.parametrize(
    ("damage", "message"),
    [(add_a_link, "link is a symbolic link"), (alter_a_file, "truncated or altered")],
)
def test_a_damaged_folder_is_not_pushed(
    server: OciServer, pulled: Path, tmp_path: Path, damage: Callable[[Path], None], message: str
) -> None:
    address = f"oci://{server.host}/{damage.__name__.replace('_', '-')}:1"
    damage(pulled)
    with pytest.raises(BundleError, match=message):
        oci.push(pulled, address)
    with pytest.raises(NotFoundError):
        oci.pull(address, tmp_path / "back")


# -- addresses, passwords, TLS ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    ["oci://", "oci://host", "oci://host/Upper:1", "oci://host/a", "oci://host/a:", "oci://host/../a:1",
     "oci://host/a//b:1", "oci://u:p@host/a:1", "oci://host/a:1@sha256:12", "oci://host/a:1?x=1",
     "oci://host:99999999/a:1", "oci://host/a:" + "x" * 200, "oci://ho st/a:1", "https://host/a:1"],
)  # fmt: skip
def test_text_that_is_no_address_is_refused(text: str, pulled: Path, tmp_path: Path) -> None:
    with pytest.raises(RegistryError, match="found no oci://HOST/name:TAG"):
        oci.pull(text, tmp_path / "back")
    with pytest.raises(RegistryError, match="found no oci://HOST/name:TAG"):
        oci.push(pulled, text)


def test_a_registry_that_does_not_run_is_unavailable(pulled: Path) -> None:
    with pytest.raises(RegistryUnavailableError, match="Connection refused"):
        oci.push(pulled, "oci://127.0.0.1:1/jets:1")


def test_an_artifact_is_pushed_to_its_own_digest(server: OciServer, pulled: Path) -> None:
    address, _ = oci.push(pulled, f"oci://{server.host}/exact:1")
    assert oci.push(pulled, address)[0] == address


def test_an_artifact_is_not_pushed_to_another_digest(server: OciServer, pulled: Path) -> None:
    with pytest.raises(RegistryError, match="HTTP 400"):
        oci.push(pulled, f"oci://{server.host}/exact@sha256:{'0' * 64}")


@pytest.fixture(scope="module")
def guarded(tmp_path_factory: pytest.TempPathFactory) -> Iterator[OciServer]:
    """A server that asks for a password."""
    running = OciServer(tmp_path_factory.mktemp("oci-guarded") / "server", password=True)
    yield running
    running.close()


def login_refusal(server: OciServer, pulled: Path, tmp_path: Path) -> str:
    """The error with which both push and pull are refused."""
    address = f"oci://{server.host}/jets:1"
    with pytest.raises(RegistryError, match="docker login") as caught:
        oci.push(pulled, address)
    assert caught.value.code == "registry-login"
    with pytest.raises(RegistryError, match="docker login") as caught:
        oci.pull(address, tmp_path / "back")
    return str(caught.value)


def test_without_a_password_a_guarded_registry_refuses(
    guarded: OciServer, pulled: Path, tmp_path: Path
) -> None:
    assert "HTTP 401" in login_refusal(guarded, pulled, tmp_path)


def test_a_wrong_password_is_not_repeated_in_the_error(
    guarded: OciServer, pulled: Path, tmp_path: Path, home: Path
) -> None:
    store_password(home, guarded.host, "wrong")
    assert "wrong" not in login_refusal(guarded, pulled, tmp_path)


def test_the_password_of_another_registry_is_not_used(
    guarded: OciServer, pulled: Path, tmp_path: Path, home: Path
) -> None:
    store_password(home, "another.example")
    login_refusal(guarded, pulled, tmp_path)


@pytest.mark.parametrize(
    "text",
    ["{", "[]", '{"auths": 5}', '{"credHelpers": 5}', '{"auths": "\xff"}', "[" * 10**5],
    ids=["cut off", "a list", "auths", "credHelpers", "not UTF-8", "deep"],
)
def test_an_unreadable_file_of_passwords_is_an_error_of_one_line(
    guarded: OciServer, pulled: Path, home: Path, text: str
) -> None:
    store_password(home, guarded.host)
    (home / ".docker/config.json").write_text(text, "latin-1")
    message = "~/.docker/config.json cannot be used: "
    with pytest.raises(RegistryError, match=message) as caught:
        oci.push(pulled, f"oci://{guarded.host}/jets:1")
    assert "\n" not in str(caught.value)


def test_the_stored_password_opens_a_guarded_registry(
    guarded: OciServer, pulled: Path, tmp_path: Path, home: Path
) -> None:
    """The password of ~/.netrc is for other programs."""
    store_password(home, guarded.host)
    (home / ".netrc").write_text("machine 127.0.0.1 login eve password wrong\n")
    address = f"oci://{guarded.host}/opened:1"
    oci.push(pulled, address)
    assert files_of(oci.pull(address, tmp_path / "back")[1].path) == files_of(pulled)


@pytest.fixture(scope="module")
def tokens(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[oci_server.Tokens, str]]:
    """What gives tokens for a password, and an address on a registry that asks for a token."""
    folder = tmp_path_factory.mktemp("oci-tokens")
    giver = oci_server.Tokens(folder)
    with answering(giver.answer) as host:
        running = OciServer(folder / "server", auth=giver.settings(host))
        yield giver, f"oci://{running.host}/jets:1"
        running.close()


@pytest.mark.parametrize("password", [None, "wrong"])
def test_without_the_password_no_token_is_given(
    tokens: tuple[oci_server.Tokens, str], pulled: Path, home: Path, password: str | None
) -> None:
    giver, address = tokens
    giver.asked.clear()
    if password is not None:
        store_password(home, address.removeprefix("oci://").partition("/")[0], password)
    with pytest.raises(RegistryError) as caught:
        oci.push(pulled, address)
    assert caught.value.code == "registry-login"
    assert giver.asked == []


def test_a_push_takes_a_token_for_reading_and_one_for_writing(
    tokens: tuple[oci_server.Tokens, str], pulled: Path, tmp_path: Path, home: Path
) -> None:
    giver, address = tokens
    giver.asked.clear()
    store_password(home, address.removeprefix("oci://").partition("/")[0])
    oci.push(pulled, address)
    oci.pull(address, tmp_path / "back")
    actions = {frozenset(scope.split(":")[2].split(",")) for scope in giver.asked}
    assert actions == {frozenset({"pull"}), frozenset({"pull", "push"})}


def test_no_password_is_sent_for_a_token_without_tls(tmp_path: Path, home: Path) -> None:
    realm = {"WWW-Authenticate": 'Bearer realm="http://192.0.2.1/t"'}
    with answering(lambda _: (401, realm, b"")) as host:
        store_password(home, host)
        with pytest.raises(RegistryError, match=r"192\.0\.2\.1: not asked, as it is without TLS"):
            oci.pull(f"oci://{host}/jets:1", tmp_path / "none")


def test_the_certificate_of_a_registry_is_verified(
    own: Callable[..., OciServer], pulled: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On loopback TLS is not used; here the server is taken for one on another host."""
    root = certify(tmp_path, "root", authority=True)
    site = certify(tmp_path, "site", root)
    server = own(http={"tls": {"certificate": str(site.pem), "key": str(site.private)}})
    address = f"oci://{server.host}/jets:1"
    monkeypatch.setattr(oci_client, "THIS_HOST", ())
    with pytest.raises(RegistryError, match="CERTIFICATE_VERIFY_FAILED"):
        oci.push(pulled, address)
    monkeypatch.setenv("REQUESTS_CA_BUNDLE", str(root.pem))
    oci.push(pulled, address)
    assert files_of(oci.pull(address, tmp_path / "back")[1].path) == files_of(pulled)


def test_a_proxy_is_asked(pulled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    paths: list[str] = []

    def answer(request: Any) -> oci_server.Answer:
        paths.append(request.path)
        return 404, {}, b""

    with answering(answer) as host:
        monkeypatch.delenv("NO_PROXY")
        monkeypatch.setenv("HTTP_PROXY", f"http://{host}")
        with pytest.raises(RegistryError):
            oci.push(pulled, "oci://127.0.0.1:1/jets:1")
    assert paths[0] == "http://127.0.0.1:1/v2/"
