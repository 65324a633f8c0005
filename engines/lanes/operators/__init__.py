"""How ATen's operators are lowered: one function for an operator or for several similar ones."""

from engines.lanes.operators import (  # each module registers its functions
    matrices,
    pointwise,
    pooling,
    products,
    reductions,
    selection,
    trees,
    views,
    without_code,
)
from engines.lanes.operators.registry import LOWERINGS as LOWERINGS
from engines.lanes.operators.registry import ROWS as ROWS
from engines.lanes.operators.registry import Operator as Operator
from engines.lanes.operators.registry import agrees as agrees
from engines.lanes.operators.registry import lower_call as lower_call
from engines.lanes.operators.registry import shape_of as shape_of

_MODULES = (
    matrices, pointwise, pooling, products, reductions, selection, trees, views, without_code
)  # fmt: skip
