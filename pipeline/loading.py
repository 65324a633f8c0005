"""Load: on a device of this host, or in a server."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

from runtime.errors import LoadError
from runtime.loader import Mode
from runtime.loader import load as load_here
from serving.remote_options import SCHEME, RemoteOptions

if TYPE_CHECKING:
    import torch

    from registry.store import Registry
    from runtime.devices import MultiDeviceSession
    from runtime.session import Session
    from serving.remote import RemoteSession


@overload
def load(  # type: ignore[overload-overlap]  # "auto" is a str too, with another result
    ref: str | Path,
    *,
    device: Literal["auto"],
    mode: Mode = ...,
    registry: Registry | str | None = ...,
    engine_name: str | None = ...,
    threads: int | None = ...,
    instances: int | None = ...,
) -> MultiDeviceSession: ...


@overload
def load(
    ref: str | Path,
    *,
    device: str | torch.device = ...,
    mode: Mode = ...,
    registry: Registry | str | None = ...,
    target: str | None = ...,
    engine_name: str | None = ...,
    threads: int | None = ...,
    instances: int | None = ...,
) -> Session: ...


@overload
def load(
    ref: str | Path,
    *,
    device: str,
    remote: RemoteOptions,
    mode: Literal["production"] = ...,
    registry: Registry | str | None = ...,
) -> RemoteSession: ...


@overload
def load(
    ref: str | Path,
    *,
    device: str,
    remote: RemoteOptions,
    mode: Mode,
    registry: Registry | str | None = ...,
) -> Session: ...


def load(
    ref: str | Path,
    *,
    device: str | torch.device = "cpu",
    mode: Mode = "production",
    registry: Registry | str | None = None,
    remote: RemoteOptions | None = None,
    **local: Any,
) -> Session | MultiDeviceSession:
    """As `runtime.load`; `device="triton://host:port"` is a server that has the version.

    What comes back then binds and runs CPU collections as a local session does. In production mode
    it is a `RemoteSession`, which has `run_async` too. `remote` says how to talk to the server:
    deadline, retries, shared memory, TLS. Target, engine, threads and instances are the server's.
    """
    if not (isinstance(device, str) and device.startswith(SCHEME)):
        if remote is not None:
            raise LoadError(f"remote options with device {str(device)!r}: write {SCHEME}HOST:PORT")
        return load_here(ref, device=device, mode=mode, registry=registry, **local)
    if mode not in ("test", "production"):
        raise LoadError(f"mode {mode!r} is neither 'test' nor 'production'")
    if given := sorted(name for name, value in local.items() if value is not None):
        raise LoadError(f"{given[0]} with device {device!r}: that is the server's to choose")
    from serving.remote import connect

    return connect(ref, device, mode=mode, registry=registry, options=remote)
