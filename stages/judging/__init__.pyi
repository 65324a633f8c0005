from .edge_rules import Special as Special
from .edge_rules import at_edge as at_edge
from .many_rows import share_below as share_below
from .many_rows import tried_on as tried_on
