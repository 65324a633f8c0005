"""Access to MLflow: choice of the store, a test that it answers, and errors of one line each.

MLflow waits long before it gives up: 20 s on a locked SQLite file, a hundred seconds on a database
server that does not exist, 4 minutes on a silent tracking server. These are good defaults for a
training job and bad ones for a command that somebody waits for. So each operation first sends the
store a small request with a short time limit. MLflow's own settings stay as they are: it still
waits long for a server that answers but is busy.

MLflow is imported inside functions, because the import takes more than a second.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import socket
import sqlite3
import tempfile
import threading
import uuid
from collections.abc import Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import quote, urlsplit

from registry.errors import NoRegistryError, NotFoundError, RegistryError, RegistryUnavailableError
from registry.mlflow.client_store import ClientStore
from registry.mlflow.store_protocol import Store
from soa.errors import SoaPipelineError, causes
from soa.files import Inode, inode_of, read_plain
from soa.options import PATH, TEXT, takes

if TYPE_CHECKING:
    from mlflow.tracking import MlflowClient

URI_VARIABLE = "PIPELINE_REGISTRY"
ARTIFACTS_VARIABLE = "PIPELINE_ARTIFACTS"
DEFAULT_FOLDER = "pipeline-registry"
LOCK_WAIT_S = 5.0
ANSWER_WAIT_S = 5.0
_LONGEST_LINE = 300  # of an error, in characters

_SQLITE = "sqlite:///"
_DEFAULT_PORTS = {"postgresql": 5432, "mysql": 3306, "mssql": 1433}
_FOREIGN = frozenset(
    ("mlflow", "sqlalchemy", "alembic", "requests", "urllib3", "sqlite3", "botocore", "google")
)


class Access:
    """One MLflow URI for both runs and registered models, and the place of new artifacts.

    `uri` is absolute, and may contain a password.
    """

    @takes(RegistryError, uri=TEXT.or_none, artifact_root=PATH.or_none)
    def __init__(self, uri: str | None = None, artifact_root: str | Path | None = None) -> None:
        chosen = uri or os.environ.get(URI_VARIABLE)
        self.uri = _absolute_uri(chosen or f"{_SQLITE}{Path.cwd()}/{DEFAULT_FOLDER}/registry.db")
        file = self.uri.removeprefix(_SQLITE).partition("?")[0]
        self.sqlite = Path(file) if self.uri.startswith(_SQLITE) else None
        root = artifact_root or os.environ.get(ARTIFACTS_VARIABLE)
        if root is None and self.sqlite is not None:
            root = self.sqlite.parent / "artifacts"
        self._artifact_root = root
        self._client: MlflowClient | None = None
        self._new_database = b""

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.shown!r})"

    @property
    def shown(self) -> str:
        """The URI for messages, without its password."""
        return re.sub(r"(://[^/:@]*):[^/@]*@", r"\1:***@", self.uri)

    @property
    def exists(self) -> bool:
        """False only if the registry is an SQLite file that does not exist yet."""
        return self.sqlite is None or self.sqlite.exists()

    def artifact_location(self, name: str) -> str | None:
        """Return the URI of the folder for the model `name`; None: the tracking server decides.

        Raises RegistryError for a database other than SQLite if no such place was named.
        """
        root = self._artifact_root
        if root is None:
            if urlsplit(self.uri).scheme in ("http", "https"):
                return None
            raise RegistryError(
                f"registry {self.shown}: a database keeps no files: say where bundles go, with "
                f"{ARTIFACTS_VARIABLE}=<folder or URI>"
            )
        if isinstance(root, str) and "://" in root:
            return f"{root.rstrip('/')}/{name}"
        return (Path(root).expanduser().absolute() / name).as_uri()

    @contextlib.contextmanager
    def reading(self) -> Iterator[Store]:
        """Yield a `Store` for reading; errors inside the block become RegistryErrors.

        The store asks the server or the database directly if that is known to give the same answers
        as MLflow's client; else it asks that client. Raises NoRegistryError if the file does not
        exist or the database has no tables: neither is ever created here.
        """
        if not self.exists:
            raise NoRegistryError.at(self.shown, "the file does not exist")
        with self._answering(write=False), self._direct_store() as direct:
            yield direct or ClientStore(self._mlflow_client())

    @contextlib.contextmanager
    def client(self, *, write: bool = False) -> Iterator[MlflowClient]:
        """Yield MLflow's client once the store has answered; errors inside become RegistryErrors.

        Blocks may be nested, such as a reader in a writer: only the outermost one tests the store.
        A reader never creates the store: test `exists` first.
        """
        # Standard output and error belong to the command: MLflow would print the URL of an ended
        # run, and bars for files.
        quiet = _silent.set(
            MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT="true",
            MLFLOW_ENABLE_ARTIFACTS_PROGRESS_BAR="false",
        )
        with self._answering(write), quiet:
            if write and self.sqlite is not None and not self.sqlite.exists():
                _write_database(self.sqlite, self._new_database or _make_database())
            yield self._mlflow_client()

    def get_ready(self) -> None:
        """Do what makes the first write slow: import libraries, connect, make tables in memory.

        Tables are made if the registry does not exist yet. This takes seconds, so it can run in the
        background. Nothing is created, and errors are ignored: the later write raises them again.
        """
        _silence_mlflow()
        import mlflow.tracking  # noqa: F401

        with contextlib.suppress(RegistryError, OSError):
            if self.exists:
                with self.client(write=True):
                    pass
            else:
                with _quietly():
                    self._new_database = _make_database()

    @contextlib.contextmanager
    def _answering(self, write: bool) -> Iterator[None]:
        """Check that the registry answers, then turn MLflow's errors in the block into ours.

        The check is left out in a block inside another one. `write`: the block will write.
        """
        nested = _inside.get()
        try:
            with _quietly():
                if write and self.sqlite is not None:
                    self.sqlite.parent.mkdir(parents=True, exist_ok=True)
                if not nested:
                    self._require_answer(write)
                self._require_same_file()
                yield
        except SoaPipelineError:
            raise
        except Exception as error:
            foreign = type(error).__module__.partition(".")[0] in _FOREIGN
            if not foreign and not isinstance(error, (OSError, ImportError)):
                raise
            raise translate_error(error, self.shown) from error

    def _direct_store(self) -> contextlib.AbstractContextManager[Store | None]:
        """Return a block with a store that needs no MLflow client; it gives None if none exists."""
        scheme = urlsplit(self.uri).scheme
        if scheme in ("http", "https"):
            from registry.mlflow.rest_store import open_server

            return open_server(self.uri)
        if scheme.partition("+")[0] in ("sqlite", "postgresql"):
            from registry.mlflow.database_store import open_tables

            return open_tables(self.uri, self.sqlite, self.shown, LOCK_WAIT_S)
        return contextlib.nullcontext()

    def _mlflow_client(self) -> MlflowClient:
        """Return MLflow's client, which is made at the first call."""
        if self._client is None:
            _silence_mlflow()
            from mlflow.tracking import MlflowClient

            # Both URIs are given: MLflow would take a missing one from the environment, or use
            # an mlflow.db in the working folder.
            self._client = MlflowClient(tracking_uri=self.uri, registry_uri=self.uri)
            if self.sqlite is not None and (file := inode_of(self.sqlite)) is not None:
                _opened.setdefault(self.uri, file)
        return self._client

    def _require_answer(self, write: bool) -> None:
        """Raise an error if the server or database does not answer soon. `write`: see `client`."""
        address = urlsplit(self.uri)
        scheme = address.scheme.partition("+")[0]
        if self.sqlite is not None:
            if self.sqlite.exists():
                _ask_sqlite(self.sqlite, write)
        elif scheme in ("http", "https"):
            self._ask_server()
        elif scheme in _DEFAULT_PORTS and address.hostname is not None:  # else a socket file
            self._ask_database(address.hostname, address.port or _DEFAULT_PORTS[scheme])

    def _ask_server(self) -> None:
        """Send MLflow's server a request that it answers without its database."""
        import requests

        from registry.mlflow.rest_store import request_options

        health = f"{self.uri.rstrip('/')}/health"
        try:
            status = requests.get(health, timeout=ANSWER_WAIT_S, **request_options()).status_code
        except OSError as error:  # all errors of `requests` are OSErrors
            raise self._no_answer("server", error) from error
        if status in (502, 503, 504):  # a proxy that has lost its server
            raise RegistryUnavailableError(
                f"registry {self.shown}: the server is not available (HTTP {status})"
            )

    def _ask_database(self, host: str, port: int) -> None:
        """Connect to a database server and send nothing, to see that it answers."""
        try:
            socket.create_connection((host, port), ANSWER_WAIT_S).close()
        except OSError as error:
            raise self._no_answer("database", error) from error

    def _no_answer(self, peer: str, error: OSError) -> RegistryUnavailableError:
        """Return the error for a `peer`, "server" or "database", that does not answer."""
        text = f"registry {self.shown}: no answer from the {peer}: {error_text(error)}"
        return RegistryUnavailableError(text)

    def _require_same_file(self) -> None:
        """Raise RegistryUnavailableError if the SQLite file is not the one that was opened first.

        MLflow keeps its connections until the process ends, also to a file that was deleted.
        Whatever it then writes is lost without an error.
        """
        known = _opened.get(self.uri)
        if known is not None and self.sqlite is not None and known != inode_of(self.sqlite):
            raise RegistryUnavailableError(
                f"registry {self.shown}: the file was deleted or replaced since this process "
                "opened it: start a new process"
            )


# The file that this process has opened, by URI. MLflow's own cache of connections has the same
# keys.
_opened: dict[str, Inode] = {}


def _absolute_uri(uri: str) -> str:
    """Return a registry's URI with an absolute path. Raises RegistryError for any other URI."""
    scheme = urlsplit(uri).scheme
    if scheme in ("", "file") or len(scheme) == 1:
        folder = uri.removeprefix("file://")
        raise RegistryError(
            f"registry {uri!r}: MLflow keeps a registry in a database or behind a server: write "
            f"sqlite:///{folder.rstrip('/')}/registry.db, http://host:port or postgresql://..."
        )
    if scheme.startswith("sqlite"):
        path, mark, options = uri.removeprefix(_SQLITE).partition("?")
        if not uri.startswith(_SQLITE) or path in ("", ":memory:") or path.startswith("file:"):
            raise RegistryError(f"registry {uri!r}: a file is needed, as sqlite:///folder/file.db")
        # The meaning of a relative path would change with the working folder.
        return f"{_SQLITE}{Path(path).expanduser().absolute()}{mark}{options}"
    return uri


def _ask_sqlite(path: Path, write: bool) -> None:
    """Test that an SQLite file answers, with one short transaction that reads, or that writes.

    A transaction for writing changes nothing, but needs the lock. Errors are those of sqlite3.
    """
    # SQLite opens a file that this user may only read for reading, also with `mode=rw`. Otherwise
    # it must be able to write: it undoes the half transaction of a killed writer before it reads.
    uri = f"file:{quote(str(path))}?mode=rw"
    with contextlib.closing(
        sqlite3.connect(uri, uri=True, timeout=LOCK_WAIT_S, isolation_level=None)
    ) as connection:
        connection.execute("SELECT count(*) FROM sqlite_master").fetchone()
        if write:
            connection.execute("BEGIN IMMEDIATE")
            connection.execute("ROLLBACK")


def _make_database() -> bytes:
    """Return the content of a new SQLite file with all of MLflow's tables, made by MLflow."""
    _silence_mlflow()
    from mlflow.store.db.utils import _initialize_tables, create_sqlalchemy_engine_with_retry

    with tempfile.TemporaryDirectory(prefix="soa-registry-") as folder:
        file = Path(folder) / "registry.db"
        engine = create_sqlalchemy_engine_with_retry(f"{_SQLITE}{file}")  # type: ignore[no-untyped-call]
        try:
            _initialize_tables(engine)  # type: ignore[no-untyped-call]
        finally:
            engine.dispose()
        return read_plain(file, largest=None)


def _write_database(path: Path, content: bytes) -> None:
    """Write a new database file, completely or not at all; one that exists already stays.

    MLflow cannot complete a file that has only some of the tables, for example after a full disk or
    Ctrl-C.
    """
    partial = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}.partial")
    try:
        with partial.open("wb") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())  # as SQLite does: a power cut leaves no empty registry
        with contextlib.suppress(FileExistsError):  # another process was faster: its file is used
            os.link(partial, path)
    finally:
        partial.unlink(missing_ok=True)


def _silence_mlflow() -> None:
    """Stop MLflow's usage statistics and needless log messages. To be called before its import."""
    # A production process sends no usage statistics, unless its user has set the variable.
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    for name in _CHATTY:
        logger = logging.getLogger(name)
        if not any(isinstance(known, _Quiet) for known in logger.filters):
            logger.addFilter(_Quiet())


class _Variables:
    """Environment variables that are set while at least one thread is in a `set` block.

    MLflow can be configured in no other way. Other threads of the process see the variables too.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._inside = 0
        self._before: dict[str, str | None] = {}

    @contextlib.contextmanager
    def set(self, **values: str) -> Iterator[None]:
        """Set the variables in the block, and restore them afterwards.

        Blocks of several threads may overlap: the first one sets them, the last one restores them.
        All blocks of one object set the same names.
        """
        with self._lock:
            if self._inside == 0:
                self._before = {name: os.environ.get(name) for name in values}
                os.environ.update(values)
            self._inside += 1
        try:
            yield
        finally:
            with self._lock:
                self._inside -= 1
                if self._inside == 0:
                    self._restore()

    def _restore(self) -> None:
        """Give the variables the values from before the first block. The caller holds `_lock`."""
        for name, value in self._before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


_silent, _once = _Variables(), _Variables()


def send_once(seconds: float) -> contextlib.AbstractContextManager[None]:
    """Return a block in which MLflow's client sends each request once and waits for `seconds`."""
    return _once.set(
        MLFLOW_HTTP_REQUEST_MAX_RETRIES="0", MLFLOW_HTTP_REQUEST_TIMEOUT=str(max(1, int(seconds)))
    )


# MLflow logs each step when it creates its tables, and a whole traceback for each database error
# that it then raises. Only messages during our own calls are dropped: the process may also use
# MLflow for other purposes.
_CHATTY = (
    "mlflow.store.db.utils",
    "mlflow.store.model_registry.abstract_store",
    "alembic.runtime.migration",
    "alembic.runtime.plugins",
)
_inside: ContextVar[bool] = ContextVar("inside_registry", default=False)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep MLflow from logging anything from this thread inside the block."""
    token = _inside.set(True)
    try:
        yield
    finally:
        _inside.reset(token)


class _Quiet(logging.Filter):
    """Drops the messages that MLflow logs inside `_quietly`."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Return False, which drops the message, if this thread is in `_quietly`."""
        return not _inside.get()


_MISSING = ("RESOURCE_DOES_NOT_EXIST", "NOT_FOUND")
_BUSY = ("TEMPORARILY_UNAVAILABLE", "REQUEST_LIMIT_EXCEEDED")
_DAMAGED = ("not a database", "malformed", "no such table", "schema")


def translate_error(error: Exception, shown: str) -> RegistryError:
    """Translate an error of MLflow, of its database or of the network into one of ours.

    The message is one line that begins with `shown`, the URI without its password. The type is

    - RegistryUnavailableError if a later try may work: the store is locked, busy or not reached;
    - NotFoundError if what was asked for does not exist;
    - RegistryError for anything else. A damaged database is told from a network that fails by its
      message, since MLflow has an error code for neither.
    """
    text = f"registry {shown}: {error_text(error)}"
    code = getattr(error, "error_code", None)
    if isinstance(error, ImportError):
        return RegistryError(f"{text}: install what this kind of store needs")
    if "is locked" in text:
        return RegistryUnavailableError(f"{text}: another process is using it, try again")
    if any(word in text for word in _DAMAGED):
        return RegistryError(text)
    if code in _MISSING:
        return NotFoundError(text)
    not_reached = "API request to" in str(error)  # so begins the error of MLflow's client
    of_the_system = code is None and not isinstance(error, ValueError)  # the disk, the network
    if code in _BUSY or not_reached or of_the_system:
        return RegistryUnavailableError(text)
    return RegistryError(text)


def error_text(error: BaseException) -> str:
    """Return the innermost message of an error in one line.

    MLflow wraps SQLAlchemy's error, which wraps the driver's; `requests` nests four of its own.
    """
    for cause in causes(error):
        original = getattr(cause, "orig", None)  # SQLAlchemy's name for the driver's error
        if isinstance(original, BaseException):
            return _one_line(original)
    if isinstance(error, OSError) and error.strerror and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    # `requests` nests the texts of four exceptions; only the innermost one is shown.
    message = " ".join(str(error).split())
    if system := re.search(r"\[Errno -?\d+\] ([^'\")]+)", message):
        return system[1]
    if status := re.search(r"too many (\d+) error responses", message):
        return f"the server answers HTTP {status[1]}"
    if "Read timed out" in message:
        return "the server did not answer in time"
    if "Connection aborted" in message:
        return "the server broke off"
    return _one_line(error)


def _one_line(error: BaseException) -> str:
    """Return an error's text, or its type if it has none, in one line that is cut if too long."""
    text = " ".join(str(error).split()) or type(error).__name__
    return text if len(text) <= _LONGEST_LINE else f"{text[: _LONGEST_LINE - 1]}…"
