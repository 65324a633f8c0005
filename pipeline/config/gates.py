"""The `gates:` of a config: the conditions for a promotion."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.config.mistakes import (
    Identifier,
    Listed,
    NonNegative,
    Number,
    Part,
    Positive,
    TargetName,
    check_unique,
)


class LimitConfig(Part):
    """An upper bound: what is measured on so many `rows` of each row dimension must be at most
    `max`."""

    rows: Annotated[dict[Identifier, PositiveInt], Field(min_length=1)]
    max: Positive


class MetricConfig(Part):
    """A number that a function computes from an output and the labels, and its bounds.

    `function`: `efficiency`, `resolution`, a name of sklearn.metrics, or a callable of the user.
    `max_drop`, `max_rise`: bounds of the change from the version that has the alias, on the same
    rows.
    """

    function: str
    output: str
    label: str | None = None
    signal: int | None = None
    background: Annotated[float, Field(gt=0, lt=1)] | None = None
    threshold: Number | None = None
    kwargs: dict[str, Any] = {}
    min: Number | None = None
    max: Number | None = None
    max_drop: NonNegative | None = None
    max_rise: NonNegative | None = None

    @model_validator(mode="after")
    def _check_working_point(self) -> MetricConfig:
        """Refuse an efficiency with no working point (`background` or `threshold`) or with two, and
        another metric with `background`."""
        points = [point for point in (self.background, self.threshold) if point is not None]
        if self.function == "efficiency" and len(points) != 1:
            raise ValueError("an efficiency has a working point; give background or threshold")
        if self.function != "efficiency" and self.background is not None:
            raise ValueError(f"found background with {self.function}; only efficiency has it")
        return self


class MetricsConfig(Part):
    """A file of labelled rows, and the metrics of the version's outputs on these rows.

    `label` is the label column of all functions that do not name one.
    """

    data: str
    tree: str | None = None
    label: str | None = None
    functions: Annotated[dict[Identifier, MetricConfig], Field(min_length=1)]

    @model_validator(mode="after")
    def _require_labels(self) -> MetricsConfig:
        """Refuse a metric without a label column, neither its own nor one for all metrics."""
        unlabelled = [name for name, metric in self.functions.items() if metric.label is None]
        if self.label is None and unlabelled:
            raise ValueError(f"{unlabelled[0]!r} has no label; give it one, or a label for all")
        return self

    @property
    def own_functions(self) -> dict[str, str]:
        """The functions that are the user's own, by the name of the metric, as the config writes
        them: `file.py:callable` or `module:callable`."""
        return {name: m.function for name, m in self.functions.items() if ":" in m.function}

    def label_of(self, function: str) -> str:
        """The column that holds the labels for a metric: its own, else the one for all metrics."""
        label = self.functions[function].label or self.label
        assert label is not None
        return label


class ShadowConfig(Part):
    """Conditions on the record of a shadow, which ran next to the version in production."""

    min_events: PositiveInt
    max_abs: NonNegative | None = None
    max_rel: NonNegative | None = None
    max_errors: NonNegativeInt = 0


class GatesConfig(Part):
    """The conditions for a promotion. `required_targets`: None means all targets of the config.

    `independence`: how it must be known that no row's answer depends on other rows. `shown`: by the
    graph. `tried`: a trial is enough, also for unbounded rows and tiles. None: a trial is enough
    unless the rows are unbounded or run in tiles.
    `special_values`: inputs that are NaN, infinite or -0.0 are tried. With `refuse`, an artifact is
    refused if it answers them with a NaN or an infinity where the eager model does not, or vice
    versa.
    `outside_share`: it must be certain to 95 % that fewer rows than this share lie outside the
    tolerance.
    """

    max_slowdown: Positive = 1.1
    max_outside: Annotated[float, Field(ge=0, le=1)] = 0.0
    special_values: Literal["report", "refuse"] = "report"
    outside_share: Annotated[float, Field(gt=0, le=1)] | None = None
    reproducible: bool = False
    independence: Literal["shown", "tried"] | None = None
    required_targets: (
        Annotated[tuple[TargetName, ...], Field(strict=False), AfterValidator(check_unique)] | None
    ) = None
    latency_p99_us: Listed[LimitConfig] | None = None
    memory_mb: Listed[LimitConfig] | None = None
    max_artifact_mb: Positive | None = None
    metrics: MetricsConfig | None = None
    shadow: ShadowConfig | None = None
