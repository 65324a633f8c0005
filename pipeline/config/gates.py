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
    once,
)


class LimitConfig(Part):
    """A bound: a number that is measured with these `rows` must be at most `max`."""

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
    def _working_point(self) -> MetricConfig:
        """Refuse an efficiency without a working point or with two, and one of another metric."""
        points = [each for each in (self.background, self.threshold) if each is not None]
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
    def _labels(self) -> MetricsConfig:
        """Refuse a metric without labels."""
        without = [name for name, metric in self.functions.items() if metric.label is None]
        if self.label is None and without:
            raise ValueError(f"{without[0]!r} has no label; give it one, or a label for all")
        return self

    @property
    def own_functions(self) -> dict[str, str]:
        """The callables of the user, by metric, as the config writes them."""
        return {n: m.function for n, m in self.functions.items() if ":" in m.function}

    def label_of(self, function: str) -> str:
        """The column with the labels for a function."""
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

    `independence`: `shown`: the graph must show that rows are independent. `tried`: a trial is
    enough, also for unbounded rows and tiles. None: a trial is enough for other versions.
    `special_values`: `refuse`: a NaN or infinity other than the eager model's refuses an artifact,
    for inputs that are NaN, infinite or -0.0.
    `outside_share`: with 95 %, fewer rows than this share lie outside the tolerance.
    """

    max_slowdown: Positive = 1.1
    max_outside: Annotated[float, Field(ge=0, le=1)] = 0.0
    special_values: Literal["report", "refuse"] = "report"
    outside_share: Annotated[float, Field(gt=0, le=1)] | None = None
    reproducible: bool = False
    independence: Literal["shown", "tried"] | None = None
    required_targets: (
        Annotated[tuple[TargetName, ...], Field(strict=False), AfterValidator(once)] | None
    ) = None
    latency_p99_us: Listed[LimitConfig] | None = None
    memory_mb: Listed[LimitConfig] | None = None
    max_artifact_mb: Positive | None = None
    metrics: MetricsConfig | None = None
    shadow: ShadowConfig | None = None
