"""`pipeline deploy`: a promoted version as a repository of Triton, and refusals."""

from __future__ import annotations

import hashlib
import os
import shutil
import signal
from glob import glob
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import text_format
from tritonclient.grpc import model_config_pb2

from pipeline.cli.serving import _sigterm_as_ctrl_c
from pipeline.promotion.pulling import pull
from registry.bundle.bundle import Bundle
from registry.store.registry import Registry
from registry.version import Version
from runtime.loader import load
from tests.models.project import PASSED, TARGET, Built, answer, cli, refusal, resealed
from tests.models.signals import disposed


@pytest.fixture
def promoted(registry: Registry) -> Registry:
    """jets/1 in production."""
    registry.promote(registry.find("jets/1"), "production", PASSED)
    return registry


def deploy(registry: Registry, ref: object, *options: object) -> Any:
    """The answer of `pipeline deploy`."""
    return answer("deploy", ref, *options, registry=registry)


def config_of(repository: Path) -> Any:
    """Triton's config of the model jets."""
    text = (repository / "jets" / "config.pbtxt").read_text()
    return text_format.Parse(text, model_config_pb2.ModelConfig())


def test_the_answer_of_the_command(promoted: Registry, jets: Built, tmp_path: Path) -> None:
    assert deploy(promoted, "jets@production", "--out", tmp_path / "a") == {
        "version": "jets/1",
        "digest": jets.bundle.digest,
        "target": TARGET,
        "requests": "columns",
        "backend": "python",
        "folder": str(tmp_path / "a" / "jets"),
        "max_batch_size": 1000,
        "preferred_batch_size": [1000],
    }


def test_the_repository_of_tritons_python_backend(
    promoted: Registry, jets: Built, tmp_path: Path
) -> None:
    """It can be moved: no file holds its own path. Its bundle runs in production."""
    deploy(promoted, "jets@production", "--out", tmp_path / "a", "--instances", 2)
    shutil.move(tmp_path / "a", tmp_path / "b")
    folder = tmp_path / "b" / "jets"
    assert sorted(path.name for path in folder.iterdir()) == ["1", "config.pbtxt"]
    assert sorted(path.name for path in (folder / "1").iterdir()) == [".bundle", "model.py"]
    assert str(tmp_path) not in (folder / "config.pbtxt").read_text()
    config = config_of(tmp_path / "b")
    assert (config.name, config.backend, config.instance_group[0].count) == ("jets", "python", 2)
    assert Bundle.open(folder / "1" / ".bundle").digest == jets.bundle.digest
    load(folder / "1" / ".bundle", mode="production").close()


def version_check(repository: Path) -> dict[str, str]:
    """Does the same as CMSSW's `cmsTritonConfigTool versioncheck`.

    See cms-sw/cmssw, pull request 43696. It reads each `*/*` beside a config.pbtxt as a file, whose
    MD5 must be in the config.
    """
    verdicts = {}
    for config in repository.rglob("config.pbtxt"):
        message = text_format.Parse(config.read_text(), model_config_pb2.ModelConfig())
        agents = message.model_repository_agents.agents
        recorded = next(dict(a.parameters) for a in agents if a.name == "checksum")
        for file in map(os.path.realpath, glob(str(config.parent.resolve() / "*/*"))):
            inside = os.path.relpath(file, config.parent.resolve())
            md5 = hashlib.md5(Path(file).read_bytes()).hexdigest()
            if f"MD5:{inside}" not in recorded:
                verdicts[inside] = "missing"
            else:
                correct = recorded[f"MD5:{inside}"] == md5
                verdicts[inside] = "correct" if correct else "incorrect"
    return verdicts


each_backend = pytest.mark.parametrize(
    ("backend", "file"), [("python", "model.py"), ("pytorch", "model.pt")]
)


@each_backend
def test_cmssws_version_check_passes(
    promoted: Registry, tmp_path: Path, backend: str, file: str
) -> None:
    deploy(promoted, "jets", "--out", tmp_path, "--backend", backend)
    assert version_check(tmp_path) == {f"1/{file}": "correct"}


@each_backend
def test_cmssws_version_check_sees_a_changed_file(
    promoted: Registry, tmp_path: Path, backend: str, file: str
) -> None:
    deploy(promoted, "jets", "--out", tmp_path, "--backend", backend)
    with (tmp_path / "jets" / "1" / file).open("ab") as changed:
        changed.write(b"\n")
    assert version_check(tmp_path) == {f"1/{file}": "incorrect"}


@each_backend
def test_the_config_has_the_md5_of_each_file(
    promoted: Registry, tmp_path: Path, backend: str, file: str
) -> None:
    """Triton's own agent checks all of them, in the bundle too."""
    deploy(promoted, "jets", "--out", tmp_path, "--backend", backend)
    (agent,) = config_of(tmp_path).model_repository_agents.agents
    for key, md5 in agent.parameters.items():
        content = (tmp_path / "jets" / key.removeprefix("MD5:")).read_bytes()
        assert hashlib.md5(content).hexdigest() == md5
    assert f"MD5:1/{file}" in agent.parameters
    assert ("MD5:1/.bundle/SHA256SUMS" in agent.parameters) == (backend == "python")


def test_a_pulled_folder_gives_the_same_config_as_its_registry(
    promoted: Registry, tmp_path: Path
) -> None:
    pull(promoted, "jets@production", tmp_path / "pulled")
    from_registry = deploy(promoted, "jets@production", "--out", tmp_path / "a")
    from_folder = deploy(promoted, tmp_path / "pulled", "--out", tmp_path / "b")
    assert from_folder["version"] == "jets/1"
    assert from_folder["digest"] == from_registry["digest"]
    configs = [(tmp_path / out / "jets/config.pbtxt").read_text() for out in "ab"]
    assert configs[0] == configs[1]


def test_requests_of_blocks_are_never_merged(promoted: Registry, tmp_path: Path) -> None:
    where = ("--out", tmp_path / "a", "--requests", "blocks", "--registry", promoted.uri)
    text = cli("deploy", "jets", *where).stdout
    assert "requests are not merged: a block (F, n) has its rows last" in text
    config = config_of(tmp_path / "a")
    assert config.max_batch_size == 0
    assert {e.name: list(e.dims) for e in config.input} == {"features": [6, -1]}


@pytest.fixture
def slow(registry: Registry, jets: Built, tmp_path: Path) -> Version:
    """A version in production whose benchmark has 10 ms per row, for one row and for 32."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        for record in manifest["targets"].values():
            for candidate in record["candidates"].values():
                a_row = dict.fromkeys(("median_us", "p05_us", "p95_us"), 1e4)
                candidate["benchmark"] = {"1": a_row, "32": dict.fromkeys(a_row, 32 * 1e4)}

    version = registry.register(resealed(jets.bundle, tmp_path / "slow", edit))
    registry.promote(version, "production", PASSED)
    return version


def test_requests_that_would_gain_nothing_run_alone(
    registry: Registry, slow: Version, tmp_path: Path
) -> None:
    """The version's benchmark decides."""
    where = ("--registry", registry.uri, "--out", tmp_path / "a")
    text = cli("deploy", slow.ref, *where).stdout
    assert "requests are not merged: by its benchmark a row takes 10 ms alone and 10 ms" in text
    config = config_of(tmp_path / "a")
    assert config.max_batch_size == 1000  # a client may divide a request
    assert not config.HasField("dynamic_batching")


def test_requests_that_would_gain_nothing_are_merged_if_asked(
    registry: Registry, slow: Version, tmp_path: Path
) -> None:
    cli("deploy", slow.ref, "--registry", registry.uri, "--out", tmp_path / "a", "--merge")
    config = config_of(tmp_path / "a")
    assert config.max_batch_size == 1000
    assert list(config.dynamic_batching.preferred_batch_size) == [32]


def test_requests_whose_rows_may_see_each_other_run_alone(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    """The graph shows this, although a trial on the reference's rows would not."""

    def dependent(_: Path, manifest: dict[str, Any]) -> None:
        assert manifest["capture"]["dependence"] == ""
        manifest["capture"]["dependence"] = "aten.amax.default works across the rows (model.py:7)"

    version = registry.register(resealed(jets.bundle, tmp_path / "dependent", dependent))
    registry.promote(version, "production", PASSED)
    where = ("--registry", registry.uri, "--out", tmp_path / "a")
    assert "(model.py:7)" in refusal("deploy", version.ref, *where, "--merge")
    assert "(model.py:7)" in cli("deploy", version.ref, *where).stdout
    assert config_of(tmp_path / "a").max_batch_size == 0


def test_merging_of_blocks_is_refused(promoted: Registry, tmp_path: Path) -> None:
    message = refused(promoted, tmp_path / "a", "--merge", "--requests", "blocks")
    assert message.startswith("jets: --merge cannot be: a block (F, n) has its rows last")


def test_requests_are_merged_by_default(promoted: Registry, tmp_path: Path) -> None:
    where = ("--registry", promoted.uri, "--out", tmp_path / "a")
    text = cli("deploy", "jets", *where).stdout
    assert f"jets/1 ({TARGET}) is in {tmp_path}/a/jets" in text
    assert "requests are merged up to 1000 rows; preferred: 1000" in text


def test_requests_run_alone_if_asked(promoted: Registry, tmp_path: Path) -> None:
    where = ("--registry", promoted.uri, "--out", tmp_path / "a")
    assert "requests are not merged: --alone" in cli("deploy", "jets", *where, "--alone").stdout


def test_a_repository_for_tritons_own_backend(promoted: Registry, tmp_path: Path) -> None:
    deploy(promoted, "jets", "--out", tmp_path, "--backend", "pytorch", "--requests", "rows")
    folder = tmp_path / "jets"
    assert sorted(p.name for p in (folder / "1").iterdir()) == ["model.pt"]
    config = config_of(tmp_path)
    assert (config.backend, config.default_model_filename) == ("pytorch", "model.pt")
    assert {e.name: list(e.dims) for e in config.input} == {"features__0": [6]}
    assert {e.name: list(e.dims) for e in config.output} == {"probabilities__0": [3]}
    assert config.max_batch_size == 1000 and config.HasField("dynamic_batching")


def test_a_backend_that_the_version_has_nothing_for_is_refused(
    promoted: Registry, tmp_path: Path
) -> None:
    message = refused(promoted, tmp_path / "a", "--backend", "onnxruntime")
    assert message.startswith(f"jets has no valid artifact of onnxruntime for {TARGET}")


def test_a_refused_backend_names_the_target_that_has_an_artifact_for_it(
    registry: Registry, jets: Built, tmp_path: Path
) -> None:
    """Happens if a target was built later, for fewer engines than the config lists."""

    def edit(_: Path, manifest: dict[str, Any]) -> None:
        record = manifest["targets"][TARGET]
        other = {**record["candidates"], "onnxruntime": record["candidates"]["exported"]}
        manifest["targets"]["cpu/x86-64-v2"] = {**record, "candidates": other}

    ref = registry.register(resealed(jets.bundle, tmp_path / "edited", edit)).ref
    registry.promote(registry.find(ref), "production", PASSED)
    where = ("--out", tmp_path / "a", "--registry", registry.uri)
    message = refusal("deploy", ref, *where, "--backend", "onnxruntime")
    assert f"no valid artifact of onnxruntime for {TARGET}" in message
    assert "cpu/x86-64-v2 has one: --target cpu/x86-64-v2" in message
    assert "config" not in message


def test_a_plan_for_tensorrt_is_refused(promoted: Registry, tmp_path: Path) -> None:
    """Older releases made them."""
    where = ("--out", tmp_path / "a", "--registry", promoted.uri, "--backend", "tensorrt")
    error = cli("deploy", "jets", *where, code=2).stderr.strip().splitlines()[-1]
    assert "TensorRT plans are gone: write --device cuda:0" in error
    assert not (tmp_path / "a").exists()


def test_a_repository_that_is_there_is_replaced_only_if_asked(
    promoted: Registry, tmp_path: Path
) -> None:
    where = ("--out", tmp_path / "a", "--registry", promoted.uri)
    cli("deploy", "jets", *where)
    assert "exists already: remove it, or replace it with --replace" in refusal(
        "deploy", "jets", *where
    )
    (tmp_path / "a" / "jets" / "config.pbtxt").write_text("old")
    cli("deploy", "jets", *where, "--replace")
    assert (tmp_path / "a" / "jets" / "config.pbtxt").read_text() != "old"


@pytest.mark.parametrize(
    ("name", "problem"),
    [("a b", "a space in it: name another"), ("$(it)", "a path with a $ in it")],
)
def test_a_path_that_tritons_python_cannot_start_from_is_refused(
    promoted: Registry, tmp_path: Path, name: str, problem: str
) -> None:
    assert problem in refused(promoted, tmp_path / name)


def test_what_is_no_model_is_not_replaced(promoted: Registry, tmp_path: Path) -> None:
    where = ("--out", tmp_path, "--registry", promoted.uri, "--replace")
    (tmp_path / "jets").mkdir()
    (tmp_path / "jets" / "mine").touch()
    assert "jets holds no config.pbtxt" in refusal("deploy", "jets@production", *where)
    assert [path.name for path in (tmp_path / "jets").iterdir()] == ["mine"]


def test_what_no_gate_let_pass(registry: Registry, jets: Built, tmp_path: Path) -> None:
    where = ("--out", tmp_path / "a", "--registry", registry.uri)
    assert "never promoted to production" in refusal("deploy", "jets/1", *where)
    assert "no promotion vouches for" in refusal("deploy", jets.bundle.path, *where)
    assert not (tmp_path / "a").exists()


def refused(registry: Registry, folder: Path, *options: object) -> str:
    """The line with which `deploy` refuses; it has written nothing."""
    message = refusal("deploy", "jets", "--out", folder, "--registry", registry.uri, *options)
    assert not folder.exists()
    return message


def test_a_device_without_a_target_is_refused(promoted: Registry, tmp_path: Path) -> None:
    message = refused(promoted, tmp_path / "a", "--device", "cuda:0")
    assert message == f"jets has no verified target for cuda:0; it has: {TARGET}"


def test_a_target_that_the_version_lacks_is_refused(promoted: Registry, tmp_path: Path) -> None:
    message = refused(promoted, tmp_path / "a", "--target", "cpu/aarch64")
    assert message.startswith("jets has no verified target cpu/aarch64 for cpu; it has:")


@pytest.mark.parametrize(
    ("option", "number"), [("instances", 0), ("instances", 10**30), ("queue-delay-us", 10**30)]
)
def test_numbers_that_triton_does_not_take_are_refused(
    promoted: Registry, tmp_path: Path, option: str, number: int
) -> None:
    assert "at least 1 instance" in refused(promoted, tmp_path / "a", f"--{option}", number)


def test_serving_without_a_tritonserver_is_refused(promoted: Registry, tmp_path: Path) -> None:
    where = ("--registry", promoted.uri, "--tritonserver", tmp_path / "none")
    message = refusal("serve", "jets", *where)
    assert message == f"{tmp_path}/none is no tritonserver: there is no such executable file"


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_what_ends_the_command_ends_its_servers(number: signal.Signals) -> None:
    """Like Ctrl-C, so a closed terminal leaves no Triton behind."""
    with disposed(number, signal.SIG_DFL):
        with pytest.raises(KeyboardInterrupt), _sigterm_as_ctrl_c():
            signal.raise_signal(number)
        assert signal.getsignal(number) == signal.SIG_DFL


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_nohup_ignores_does_not_end_the_command(number: signal.Signals) -> None:
    """No KeyboardInterrupt is raised."""
    with disposed(number, signal.SIG_IGN), _sigterm_as_ctrl_c():
        signal.raise_signal(number)
