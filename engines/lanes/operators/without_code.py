"""The rules for rows of operators that `lanes` has no code for, and that torch does not take apart.

Other engines run them, so it must be known whether their rows depend on each other.
"""

from __future__ import annotations

from engines.exported import row_rules, shape_rules
from engines.lanes.operators.registry import register_rule

register_rule(shape_rules.follow_arange, "arange")
register_rule(
    row_rules.follow_along_dims,
    "median", "nanmedian", "kthvalue", "mode", "cummax", "cummin", "logcumsumexp",
    "cosine_similarity",
    "_fft_r2c", "_fft_c2r", "_fft_c2c",
)  # fmt: skip
register_rule(row_rules.follow_matrices, "_linalg_det", "_linalg_slogdet", "linalg_inv_ex")
register_rule(
    row_rules.refuse_rows,
    "as_strided", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive",
    "bincount", "histc",
)  # fmt: skip
register_rule(
    row_rules.follow_pointwise, "view_as_real", "one_hot", "log_sigmoid", "log_sigmoid_forward"
)
# torch would take these apart, but into very many operators, or with the rows beside channels.
register_rule(row_rules.follow_recurrent, "lstm", "gru", "rnn_tanh", "rnn_relu")
register_rule(row_rules.follow_convolution, "group_norm", "instance_norm")
