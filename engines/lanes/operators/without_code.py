"""The rules for rows of operators that have no code here and that torch does not take apart."""

from __future__ import annotations

from engines.exported import row_rules, shape_rules
from engines.lanes.operators.registry import has_rule

has_rule(shape_rules.counting, "arange")
has_rule(
    row_rules.along,
    "median", "nanmedian", "kthvalue", "mode", "cummax", "cummin", "logcumsumexp",
    "cosine_similarity",
    "_fft_r2c", "_fft_c2r", "_fft_c2c",
)  # fmt: skip
has_rule(
    row_rules.matrices,
    "_linalg_det", "_linalg_slogdet", "linalg_inv_ex",
)  # fmt: skip
has_rule(
    row_rules.mixed,
    "as_strided", "nonzero", "masked_select", "unique_dim", "_unique2", "unique_consecutive",
    "bincount", "histc",
)  # fmt: skip
has_rule(row_rules.pointwise, "view_as_real", "one_hot", "log_sigmoid", "log_sigmoid_forward")
# torch takes these apart into very many operators, or puts the rows beside channels.
has_rule(row_rules.recurrent, "lstm", "gru", "rnn_tanh", "rnn_relu")
has_rule(row_rules.convolved, "group_norm", "instance_norm")
