"""What Prometheus is told: request counters and latencies counted here, rounds and drafts from the engine's snapshot.

Counts are plain numbers, written on the event loop alone; a scrape reads them there too. Must not know HTTP or any
dialect. Names follow vLLM's (shared dashboards), under `paceline_`.
"""

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Sequence
from enum import StrEnum

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from backends.grammar.compile import CompilerStats
from engine.memory import MemoryReport
from engine.prefix import PrefixStats
from engine.thread import Engine
from scheduler.events import Finished
from scheduler.request import FinishReason
from scheduler.stats import DraftStats

_LONG = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 20.0, 40.0, 80.0, 160.0, 320.0, 640.0)
"""Bounds in seconds for what happens once per request."""
_SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.06, 0.08, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5, 5.0, 10.0)
"""Bounds in seconds for what happens once per token."""


GrammarStats = Callable[[], CompilerStats | None]
"""What became of the constraints so far; None until there is a model."""


class Refusal(StrEnum):
    """Why a request, or the connection that it came by, was turned away before the engine heard of it."""

    QUEUE_FULL = "queue_full"
    KEY_LIMIT = "key_limit"
    BODY = "body"
    """All bodies that are being read take what they may together."""
    DEADLINE = "deadline"
    """Its time was over before it was submitted."""
    CONNECTIONS = "connections"
    HEAD_SIZE = "head_size"
    HEAD_TIMEOUT = "head_timeout"
    BODY_TIMEOUT = "body_timeout"
    WRITE_TIMEOUT = "write_timeout"
    """Its client did not read the answer."""


class LatencyHistogram:
    """Seconds, by bucket. Written by `RequestMetrics`."""

    def __init__(self, name: str, help_text: str, bounds: Sequence[float]) -> None:
        self.name = name
        self.help_text = help_text
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        """`counts[i]` observations fell into bucket i (not cumulated; the last one is above all bounds)."""
        self.total = 0.0

    def observe(self, seconds: float, times: int = 1) -> None:
        """Count `times` observations of so many seconds each."""
        self.counts[bisect_left(self.bounds, seconds)] += times
        self.total += seconds * times


class RequestMetrics:
    """Counters over all requests. Written by their `RequestRecord`s, and by whoever refuses one."""

    def __init__(self) -> None:
        self.prompt_tokens = 0
        self.cached_tokens = 0
        self.generation_tokens = 0
        self.finished = dict.fromkeys(FinishReason, 0)
        self.refused = dict.fromkeys(Refusal, 0)
        self.first_token = LatencyHistogram(
            "paceline_time_to_first_token_seconds", "From the request's arrival to its first token.", _LONG
        )
        self.inter_token = LatencyHistogram(
            "paceline_inter_token_latency_seconds",
            "Time per token after the first; a round that gives several tokens shares its time among them.",
            _SHORT,
        )
        self.whole = LatencyHistogram(
            "paceline_e2e_request_latency_seconds", "From the request's arrival to its end.", _LONG
        )
        self.queue = LatencyHistogram(
            "paceline_request_queue_time_seconds", "From being submitted to being admitted to a lane.", _LONG
        )
        self.prefill = LatencyHistogram(
            "paceline_request_prefill_time_seconds", "From being admitted to the first token.", _LONG
        )
        self.decode = LatencyHistogram(
            "paceline_request_decode_time_seconds", "From the first token to the end.", _LONG
        )

    def refuse(self, reason: Refusal) -> None:
        """One more was turned away."""
        self.refused[reason] += 1

    @property
    def latencies(self) -> tuple[LatencyHistogram, ...]:
        """All latency histograms."""
        return (self.first_token, self.inter_token, self.whole, self.queue, self.prefill, self.decode)


class RequestRecord:
    """The account of one generation. Written by the handler that follows it."""

    __slots__ = ("_metrics", "arrived", "finished", "first", "last", "tokens")

    def __init__(self, metrics: RequestMetrics, arrived: float) -> None:
        """`arrived`: when the request came, by `time.perf_counter`."""
        self._metrics = metrics
        self.arrived = arrived
        self.first: float | None = None
        """When its first token was delivered."""
        self.last = arrived
        self.tokens = 0
        self.finished: Finished | None = None

    def deliver(self, tokens: int) -> None:
        """`tokens` are delivered now, all rounds together."""
        now = time.perf_counter()
        fresh = tokens - self.tokens
        if self.first is None:
            self.first = now
            self._metrics.first_token.observe(now - self.arrived)
        elif fresh > 0:
            self._metrics.inter_token.observe((now - self.last) / fresh, fresh)
        self.last = now
        self.tokens = tokens
        self._metrics.generation_tokens += fresh

    def finish(self, ended: Finished) -> None:
        """The one end, as the client is told it. The totals grow by exactly what its usage says."""
        metrics, timing = self._metrics, ended.timing
        self.finished = ended
        metrics.finished[ended.reason] += 1
        metrics.prompt_tokens += ended.usage.prompt_tokens
        metrics.cached_tokens += ended.usage.cached_tokens
        metrics.generation_tokens += ended.usage.completion_tokens - self.tokens
        metrics.whole.observe(time.perf_counter() - self.arrived)
        if timing.admitted is not None:
            metrics.queue.observe(timing.admitted - timing.submitted)
            if timing.first_token is not None:
                metrics.prefill.observe(timing.first_token - timing.admitted)
                metrics.decode.observe(timing.finished - timing.first_token)

    def abandon(self, reason: FinishReason) -> None:
        """It was left before its end; does nothing after `finish`."""
        if self.finished is None:
            self._metrics.finished[reason] += 1


class ServerCollector(Collector):
    """Turns the counters into Prometheus metrics at each scrape."""

    def __init__(
        self, engine: Engine, metrics: RequestMetrics, grammars: GrammarStats, ready: Callable[[], bool]
    ) -> None:
        self._engine = engine
        self._metrics = metrics
        self._grammars = grammars
        self._ready = ready

    def collect(self) -> Iterable[Metric]:
        """One consistent snapshot of the engine, and the requests' counters."""
        yield GaugeMetricFamily("paceline_ready", "Whether a request could be served now.", value=self._ready())
        yield from self._requests()
        yield from self._refusals()
        yield from self._rounds()
        yield from self._setbacks()
        yield from _drafts(self._engine.stats.drafts)
        if (memory := self._engine.memory) is not None:
            yield _memory(memory)
        if (prefix := self._engine.prefix_stats) is not None:
            yield from _prefix(prefix)
        grammars = self._grammars()
        if grammars is not None:
            yield from _compiled(grammars)
        info = self._engine.info
        if info is not None:
            labels = {"model": info.name, "device": info.device}
            yield InfoMetricFamily("paceline_model", "The served model and what computes it.", value=labels)

    def _requests(self) -> Iterable[Metric]:
        stats, metrics = self._engine.stats, self._metrics
        yield GaugeMetricFamily("paceline_num_requests_running", "Requests in a lane.", value=stats.running)
        yield GaugeMetricFamily("paceline_num_requests_waiting", "Requests in the queue.", value=stats.waiting)
        yield CounterMetricFamily(
            "paceline_prompt_tokens", "Prompt tokens of ended requests.", value=metrics.prompt_tokens
        )
        yield CounterMetricFamily(
            "paceline_prefix_cache_queries", "Prompt tokens that were looked for.", value=metrics.prompt_tokens
        )
        yield CounterMetricFamily(
            "paceline_prefix_cache_hits", "Prompt tokens that need not be computed.", value=metrics.cached_tokens
        )
        yield CounterMetricFamily(
            "paceline_generation_tokens", "Tokens generated and counted in usage.", value=metrics.generation_tokens
        )
        ends = CounterMetricFamily(
            "paceline_request_success", "Ended requests by how they ended.", labels=["finished_reason"]
        )
        for reason, count in metrics.finished.items():
            ends.add_metric([str(reason)], count)
        yield ends
        for latency in metrics.latencies:
            yield _histogram(latency.name, latency.help_text, latency.bounds, latency.counts, latency.total)

    def _setbacks(self) -> Iterable[Metric]:
        stats = self._engine.stats
        yield CounterMetricFamily(
            "paceline_num_preemptions",
            "Lanes that gave way for want of memory and went on later.",
            value=stats.preemptions,
        )
        yield CounterMetricFamily(
            "paceline_failed_forwards", "Rounds whose forward failed.", value=stats.failed_forwards
        )

    def _refusals(self) -> Iterable[Metric]:
        refused = CounterMetricFamily(
            "paceline_requests_refused", "Requests and connections that were turned away.", labels=["reason"]
        )
        for reason, count in self._metrics.refused.items():
            refused.add_metric([str(reason)], count)
        yield refused

    def _rounds(self) -> Iterable[Metric]:
        stats = self._engine.stats
        rounds = CounterMetricFamily(
            "paceline_rounds", "Rounds (one forward each): prefill chunks, decode windows, or both.", labels=["kind"]
        )
        for kind, count in stats.rounds.items():
            rounds.add_metric([kind], count)
        yield rounds
        for name, help_text, counted in (
            ("paceline_lanes_per_round", "Lanes that took part in a round.", stats.lanes_per_round),
            ("paceline_rows_per_round", "Rows of a round's forward.", stats.rows_per_round),
            ("paceline_draft_rows_per_round", "Drafted rows chosen for a round.", stats.draft_rows_per_round),
        ):
            yield _histogram(name, help_text, counted.bounds, counted.counts, counted.total)


def create_registry(
    engine: Engine, metrics: RequestMetrics, grammars: GrammarStats, ready: Callable[[], bool]
) -> CollectorRegistry:
    """What `/metrics` shows: the server's own and the process's (CPU seconds, memory, open files). `ready` says whether
    a request could be served now.
    """
    registry = CollectorRegistry(auto_describe=False)
    registry.register(ServerCollector(engine, metrics, grammars, ready))
    ProcessCollector(registry=registry)
    return registry


def _histogram(name: str, help_text: str, bounds: Sequence[float], counts: Sequence[int], total: float) -> Metric:
    below, buckets = 0, []
    for bound, count in zip([*(str(float(bound)) for bound in bounds), "+Inf"], counts, strict=True):
        below += count
        buckets.append((bound, float(below)))
    return HistogramMetricFamily(name, help_text, buckets=buckets, sum_value=total)


def _drafts(sources: Sequence[DraftStats]) -> Iterable[Metric]:
    """Speculation counters by vLLM's names, with the source that wrote the draft."""
    prefix = "paceline_spec_decode_num"
    source, place = ["source"], ["source", "position"]
    drafts = CounterMetricFamily(f"{prefix}_drafts", "Drafts proposed.", labels=source)
    drafted = CounterMetricFamily(f"{prefix}_draft_tokens", "Tokens drafted.", labels=source)
    accepted = CounterMetricFamily(f"{prefix}_accepted_tokens", "Drafted tokens accepted.", labels=source)
    drafted_at = CounterMetricFamily(
        f"{prefix}_draft_tokens_per_pos", "Tokens drafted at each position of a draft.", labels=place
    )
    accepted_at = CounterMetricFamily(
        f"{prefix}_accepted_tokens_per_pos", "Drafted tokens accepted at each position of a draft.", labels=place
    )
    for stats in sources:
        drafts.add_metric([stats.source], stats.drafts)
        drafted.add_metric([stats.source], sum(stats.drafted))
        accepted.add_metric([stats.source], sum(stats.accepted))
        for family, counts in ((drafted_at, stats.drafted), (accepted_at, stats.accepted)):
            for position, count in enumerate(counts):
                family.add_metric([stats.source, str(position)], count)
    return (drafts, drafted, accepted, drafted_at, accepted_at)


def _memory(report: MemoryReport) -> Metric:
    """Bytes by what they are spent on; `budget` is what all may take, `active` and `peak` what MLX says it took."""
    parts = GaugeMetricFamily("paceline_memory_bytes", "Memory of the device by part.", labels=["part"])
    for part in MemoryReport.__struct_fields__:
        parts.add_metric([part], getattr(report, part))
    return parts


def _prefix(stats: PrefixStats) -> Iterable[Metric]:
    """The prefix cache by tier, and what became of files."""
    prefix, tier = "paceline_prefix_cache", ["tier"]
    held = GaugeMetricFamily(f"{prefix}_bytes", "What blocks take.", labels=tier)
    most = GaugeMetricFamily(f"{prefix}_max_bytes", "What they may take.", labels=tier)
    pieces = GaugeMetricFamily(f"{prefix}_blocks", "Blocks and checkpoints.", labels=tier)
    evictions = CounterMetricFamily(f"{prefix}_evictions", "Blocks that had to go for others.", labels=tier)
    refused = CounterMetricFamily(f"{prefix}_refused", "Blocks for which there was no room.", labels=tier)
    for name, account in (("ram", stats.ram), ("ssd", stats.ssd)):
        for family, value in (
            (held, account.bytes),
            (most, account.most),
            (pieces, account.pieces),
            (evictions, account.evictions),
            (refused, account.refused),
        ):
            family.add_metric([name], value)
    yield from (held, most, pieces, evictions, refused)
    yield CounterMetricFamily(f"{prefix}_restored_tokens", "Tokens copied to lanes.", value=stats.restored_tokens)
    if (files := stats.spill) is None:
        return
    yield CounterMetricFamily(f"{prefix}_spills", "Files written.", value=files.written)
    yield CounterMetricFamily(f"{prefix}_restores", "Files read.", value=files.read)
    failures = CounterMetricFamily(f"{prefix}_failures", "What went wrong with files.", labels=["kind"])
    for kind, count in (
        ("write", files.failed_writes),
        ("read", files.failed_reads),
        ("damaged", files.damaged),
        ("queue_full", files.dropped),
    ):
        failures.add_metric([kind], count)
    yield failures
    yield GaugeMetricFamily(f"{prefix}_writable", "Whether files are being written.", value=files.writable)


def _compiled(stats: CompilerStats) -> Iterable[Metric]:
    """Constraints: found compiled or not, and what they take."""
    prefix, cache = "paceline_grammar", stats.cache
    yield CounterMetricFamily(f"{prefix}_cache_hits", "Constraints that were compiled already.", value=cache.hits)
    yield CounterMetricFamily(f"{prefix}_cache_misses", "Constraints that had to be compiled.", value=cache.misses)
    yield CounterMetricFamily(f"{prefix}_cache_evictions", "Grammars dropped for room.", value=cache.evictions)
    yield GaugeMetricFamily(f"{prefix}_cache_bytes", "What the kept grammars hold.", value=cache.bytes)
    yield CounterMetricFamily(f"{prefix}_refused", "Constraints that were refused.", value=stats.refused)
    yield CounterMetricFamily(f"{prefix}_killed", "Compilations killed at a limit.", value=stats.killed)
