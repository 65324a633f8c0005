"""Fit the costs to probes of a single client. No run that is to be predicted is used."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from benchmarks.scaling.costs import Costs
from benchmarks.scaling.records import Probe

Terms = Callable[[Probe], tuple[float, ...]]


def fit(probes: Sequence[Probe]) -> Costs:
    """Fit by least squares of relative errors, with no cost below 0.

    Raises ValueError if there is no probe that sends single rows one at a time.
    """
    probes = pooled(probes)
    alone = [each for each in probes if each.burst == 1]
    first = next((each for each in alone if each.rows == 1), None)
    if first is None:
        raise ValueError("a probe with one row a request, one at a time, is needed")
    # Answers of one run come together, so a client wakes once a run.
    client_wake, client, client_row = _solve(probes, lambda p: p.client_s, _by_run)
    run, run_request, run_row = _solve(probes, lambda p: p.stub_s, _by_run)
    triton_run, request, request_row = _solve(probes, lambda p: p.triton_s, _by_run)

    # Triton's own times show which part of its work for a run keeps the instance busy.
    beside_stub = statistics.median((each.inside_s - each.stub_s) / each.runs for each in alone)
    inside = min(max(beside_stub, 0.0), triton_run)
    # If a request causes more work than its latency, the rest is done after its answer. The median
    # is used, because the mean includes moments in which other programs had the cores.
    worked = (first.client_s + first.triton_s + first.stub_s) / first.requests
    waited = statistics.median(first.latencies)
    behind = min(max(worked - waited, 0.0), triton_run - inside)
    mean = statistics.fmean(first.latencies)
    return Costs(
        client=client, client_row=client_row, client_wake=client_wake,
        request=request, request_row=request_row,
        inside=inside, reply=triton_run - inside - behind, behind=behind,
        run=run, run_request=run_request, run_row=run_row,
        wait=max(waited - worked, 0.0),
        extras=tuple(each - mean for each in first.latencies), extras_every=mean,
    )  # fmt: skip


def misfit(probes: Sequence[Probe], costs: Costs) -> float:
    """The largest relative error of the fitted work of a request, over probes with burst 1."""
    alone = [each for each in pooled(probes) if each.burst == 1]
    return max(abs(_fitted(each, costs) / _worked(each) - 1) for each in alone)


def pooled(probes: Sequence[Probe]) -> list[Probe]:
    """Join repetitions: their totals are added, their latencies are collected."""
    same: dict[tuple[int, int], list[Probe]] = {}
    for probe in probes:
        same.setdefault((probe.rows, probe.burst), []).append(probe)
    return [_together(of) for of in same.values()]


def _together(probes: Sequence[Probe]) -> Probe:
    def total(name: str) -> Any:
        return sum(getattr(probe, name) for probe in probes)

    return Probe(
        rows=probes[0].rows, burst=probes[0].burst, requests=total("requests"), runs=total("runs"),
        client_s=total("client_s"), triton_s=total("triton_s"), stub_s=total("stub_s"),
        inside_s=total("inside_s"),
        latencies=tuple(sorted(s for probe in probes for s in probe.latencies)),
        others=max(probe.others for probe in probes),
    )  # fmt: skip


def _fitted(probe: Probe, costs: Costs) -> float:
    return (
        costs.client_wake + costs.of_client(probe.rows) + costs.of_request(probe.rows)
        + costs.of_run(1, probe.rows) + costs.reply + costs.behind
    )  # fmt: skip


def _worked(probe: Probe) -> float:
    return (probe.client_s + probe.triton_s + probe.stub_s) / probe.requests


def _by_run(probe: Probe) -> tuple[float, ...]:
    return probe.runs, probe.requests, probe.requests * probe.rows


def _solve(
    probes: Sequence[Probe], total: Callable[[Probe], float], terms: Terms
) -> tuple[float, ...]:
    """The non-negative costs of the terms that fit the totals best."""
    left = np.array([terms(each) for each in probes]) / np.array([[total(p)] for p in probes])
    found = np.zeros(left.shape[1])
    used = list(range(left.shape[1]))
    while used:
        solution: npt.NDArray[np.float64] = np.linalg.lstsq(
            left[:, used], np.ones(len(probes)), rcond=None
        )[0]
        if (solution >= 0).all():
            found[used] = solution
            break
        used.pop(int(solution.argmin()))
    return tuple(found.tolist())
