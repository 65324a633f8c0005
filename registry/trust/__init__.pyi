from .keys import Trusted as Trusted
from .keys import host_keys as host_keys
from .keys import parse_trusted as parse_trusted
from .keys import read_trusted as read_trusted
from .keys import trusted_keys as trusted_keys
from .signing import put_signature as put_signature
from .signing import require_signature as require_signature
from .signing import sign as sign
