"""Names of other floors that a user needs, in one place: `pipeline` shows them as its own."""

from __future__ import annotations

from registry import (
    Registry as Registry,
)
from registry.housekeeping import (
    push as push,
)
from runtime import (
    BindError as BindError,
)
from runtime import (
    Binding as Binding,
)
from runtime import (
    CheckedSession as CheckedSession,
)
from runtime import (
    DeviationError as DeviationError,
)
from runtime import (
    LiveSession as LiveSession,
)
from runtime import (
    LoadError as LoadError,
)
from runtime import (
    MultiDeviceSession as MultiDeviceSession,
)
from runtime import (
    QueueFullError as QueueFullError,
)
from runtime import (
    Scheduler as Scheduler,
)
from runtime import (
    Session as Session,
)
from runtime import (
    Staging as Staging,
)
from runtime.process import (
    keep_freed_memory as keep_freed_memory,
)
from serving.client import (
    RemoteOptions as RemoteOptions,
)
from serving.client import (
    Tls as Tls,
)
from serving.remote import (
    RemoteSession as RemoteSession,
)
from serving.site import (
    Site as Site,
)
from serving.site import (
    SiteSession as SiteSession,
)
from soa import (
    Block as Block,
)
from soa import (
    Collection as Collection,
)
from soa import (
    Layout as Layout,
)
from soa import (
    Signature as Signature,
)
from soa import (
    SoaPipelineError as SoaPipelineError,
)
from soa import (
    column as column,
)
from soa import (
    eigen as eigen,
)
from soa import (
    scalar as scalar,
)
