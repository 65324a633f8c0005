"""The predictions as tables, by their names in docs/results/scaling.md."""

from __future__ import annotations

import math

from benchmarks.scaling.answers import BATCH, BATCHES, JOBS, Answers, proxy_threads
from benchmarks.scaling.check import GOAL
from benchmarks.scaling.records import QUIET
from pipeline.report.tables import Table, microseconds, new_table


def tables(found: Answers) -> dict[str, list[Table | str]]:
    return {
        "measured": [_state(found), _costs(found)],
        "check": [_check(found)],
        "servers": [_capacity(found), _sizes(found), _wholes(found)],
        "seeds": [_seeds(found)],
        "proxy": [_proxy(found), _proxies(found)],
        "metric": [_shown(found), _scaled(found)],
    }


def _state(found: Answers) -> str:
    measured = found.measured
    facts = ", ".join(f"{key}: {value}" for key, value in measured.machine.items())
    lines = [f"{measured.model}, measured on {measured.when}", facts]
    if not measured.quiet:
        lines.append(
            f"NOT FOR THE RECORD: other work took up to {measured.others:.2f} cores meanwhile "
            f"(quiet is {QUIET:g})"
        )
    return "\n".join(lines)


def _costs(found: Answers) -> Table:
    costs = found.costs
    extras = sorted(costs.extras)
    low, high = extras[len(extras) // 20], extras[-1 - len(extras) // 20]
    title = (
        f"time on a core, within {found.misfit:.0%} of each probe; "
        f"once in {_time(costs.extras_every)} {low * 1e6:+.0f} … {high * 1e6:+.0f} µs"
    )
    table = new_table(title, "", "each", "a request", "a row")
    rows = (
        ("client", None, costs.client, costs.client_row),
        ("client, where its core was idle", None, costs.client_wake, None),
        ("tritonserver, while it receives and answers", None, costs.request, costs.request_row),
        ("tritonserver, a run: the instance waits", costs.inside, None, None),
        ("tritonserver, a run: the answer waits", costs.reply, None, None),
        ("tritonserver, a run: nobody waits", costs.behind, None, None),
        ("the Python backend, a run", costs.run, costs.run_request, costs.run_row),
        ("nothing works, the client waits", None, costs.wait, None),
    )
    for name, *parts in rows:
        table.add_row(name, *("" if part is None else _time(part) for part in parts))
    return table


def _check(found: Answers) -> Table:
    title = "one row a request, measured → predicted; a core for the clients, one for the server"
    table = new_table(
        title, "batching", "clients", "requests/s", "p50, ms", "p99, ms", "a run",
        f"within {GOAL:.0%}",
    )  # fmt: skip
    for each in found.checked:
        run, seen = each.measured, each.predicted
        merged = len(seen.latencies) / max(1, seen.runs)
        good = [abs(ratio - 1) <= GOAL for ratio in each.ratios()]
        verdict = "yes" if all(good) else "not " + ", ".join(
            name for name, fine in zip(("rate", "p50", "p99"), good, strict=True) if not fine
        )  # fmt: skip
        table.add_row(
            "on" if run.batching else "off", str(run.clients),
            f"{run.rate:,.0f} → {seen.rate:,.0f}",
            f"{run.p50_s * 1e3:.3g} → {seen.quantile(0.5) * 1e3:.3g}",
            f"{run.p99_s * 1e3:.3g} → {seen.quantile(0.99) * 1e3:.3g}",
            f"{run.requests_a_run:.1f} → {merged:.1f}", verdict,
        )  # fmt: skip
    return table


def _capacity(found: Answers) -> Table:
    title = "one server of one core, 64 requests always outstanding"
    table = new_table(title, "rows a request", "batching", "requests/s", "rows/s", "p99")
    for (batching, rows), seen in found.capacity.items():
        table.add_row(
            str(rows), "on" if batching else "off", f"{seen.rate:,.0f}",
            f"{seen.rate * rows:,.0f}", _time(seen.quantile(0.99)),
        )  # fmt: skip
    return table


def _sizes(found: Answers) -> Table:
    table = new_table(
        "one row a request, p99 within 100 ms", "clients", "a request every", "requests/s",
        "of a server", "servers", "proxy threads",
    )  # fmt: skip
    for each in found.sizes:
        table.add_row(
            f"{each.clients:,}", f"{each.think_s:g} s", f"{each.rate:,.0f}", f"{each.share:,.0f}",
            _count(each.servers), str(proxy_threads(each.rate, found.proxy_s)),
        )  # fmt: skip
    return table


def _wholes(found: Answers) -> Table:
    table = new_table(
        "as many requests a second for each server", "servers", "requests/s of each", "p99"
    )
    for servers, (rate, p99) in found.wholes.items():
        name = str(servers) if servers else "1, clients that wait for answers"
        table.add_row(name, f"{rate:,.0f}", _time(p99))
    return table


def _seeds(found: Answers) -> Table:
    table = new_table(
        f"{JOBS} jobs, batches of {BATCH} events, every 10 min", "rows a batch", "reading",
        "requests/s", "servers", "",
    )  # fmt: skip
    for each in found.waves:
        reading = f"all at once, {BATCHES} batches each"
        table.add_row(
            str(each.rows), reading, f"{each.rate:,.0f}", str(each.servers),
            f"done in {each.done_s:.0f} s",
        )  # fmt: skip
    for sized in found.ramp:
        reading = f"all running, a batch every {sized.think_s:g} s"
        table.add_row(
            str(sized.rows), reading, f"{sized.rate:,.0f}", _count(sized.servers),
            f"a server takes {sized.share:,.0f}/s",
        )  # fmt: skip
    return table


def _proxy(found: Answers) -> Table:
    how = "measured on an Envoy" if found.measured.proxy_s else "a guess, no Envoy was there"
    title = f"a thread of the proxy\n{_time(found.proxy_s)} a request\n({how})"
    table = new_table(title, "busy", "requests/s", "mean wait")
    for load, (rate, wait) in found.proxy.items():
        table.add_row(f"{load:.0%}", f"{rate:,.0f}", _time(wait))
    return table


def _proxies(found: Answers) -> Table:
    table = new_table("before a thread is full", "servers", "rows a request")
    for (batching, rows), seen in found.capacity.items():
        if batching:
            table.add_row(f"{1 / found.proxy_s / seen.rate:,.1f}", str(rows))
    return table


def _shown(found: Answers) -> Table:
    table = new_table(
        "one server, clients that never pause, one row a request", "batching", "clients",
        "of its most", "p99 of a request", "the metric",
    )  # fmt: skip
    for batching, rows in found.shown.items():
        for each in rows:
            table.add_row(
                "on" if batching else "off", str(each.clients), f"{each.busy:.0%}",
                _time(each.p99_s), _time(each.metric_s),
            )  # fmt: skip
    return table


def _scaled(found: Answers) -> Table:
    scaled = found.scaled
    done = f"done after {scaled.done_s:.0f} s" if math.isfinite(scaled.done_s) else "never done"
    table = new_table(
        f"{JOBS} jobs at once: {done}\n{scaled.needed} servers from the start: "
        f"{found.waves[-1].done_s:.0f} s",
        "poll at", "the metric", "it wants", "ordered",
    )  # fmt: skip
    for each in scaled.decisions:
        if each.at <= scaled.within_s + 60 and each.at % 60 == 30:
            table.add_row(
                f"{each.at:.0f} s", _time(each.metric_s), str(each.wanted), str(each.servers)
            )
    return table


def _count(servers: int | None) -> str:
    return "too slow alone" if servers is None else f"{servers:,}"


def _time(seconds: float) -> str:
    return microseconds(seconds * 1e6) if seconds else "0"
