"""How each of ATen's operators is lowered: one function an operator, or a few alike."""

from engines.lanes.operators import (  # each registers its functions
    pointwise,
    pooling,
    products,
    reductions,
    selection,
    views,
)
from engines.lanes.operators.registry import LOWERINGS as LOWERINGS
from engines.lanes.operators.registry import Step as Step
from engines.lanes.operators.registry import sizes as sizes

_ROOMS = (pointwise, pooling, products, reductions, selection, views)
