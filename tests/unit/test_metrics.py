"""What Prometheus sees."""

import prometheus_client
import pytest
from prometheus_client.parser import text_string_to_metric_families

from engine.messages import Ready, Stats
from worker.metrics import PREFIX, RequestMetrics, Sources, build_registry

READY = Ready(
    usable_pages=100,
    page_size=16,
    servable_length=1600,
    hasher="h",
    vocab_size=10,
    load_line="",
    memory={"weights": 7, "kv_pool": 9},
    seconds={"load": 1.5},
    step_costs=((1, 0, 0.003), (1, 64, 0.007)),
)
# Every field has a value of its own, so that a mix-up shows.
STATS = Stats(**{name: type(default)(1000 + index) for index, (name, default) in enumerate(Stats().__rich_repr__())})


def scrape(stats: Stats = STATS) -> tuple[dict[tuple[str, str], float], dict, RequestMetrics]:
    registry, requests = build_registry(Sources(lambda: stats, READY, lambda: (5, 6, 7), lambda: 8))
    return samples(registry), families(registry), requests


def families(registry):
    text = prometheus_client.generate_latest(registry).decode()
    return {family.name: family for family in text_string_to_metric_families(text)}


def samples(registry) -> dict[tuple[str, str], float]:
    found = {}
    for family in families(registry).values():
        for sample in family.samples:
            label = next((value for key, value in sample.labels.items() if key != "le"), "")
            found[sample.name, label] = sample.value
    return found


@pytest.mark.parametrize(
    ("name", "label", "field"),
    [
        ("requests", "waiting", "waiting"),
        ("requests", "prefilling", "prefilling"),
        ("requests", "active", "active"),
        ("requests", "draining", "draining"),
        ("kv_pages", "free", "free_pages"),
        ("kv_pages", "cached", "cached_pages"),
        ("kv_pages", "referenced", "referenced_pages"),
        ("queue_age_seconds", "", "queue_age_s"),
        ("steps_total", "decode", "decode_steps"),
        ("steps_total", "unified", "unified_steps"),
        ("step_seconds_total", "decode", "decode_step_seconds"),
        ("step_seconds_total", "unified", "unified_step_seconds"),
        ("decode_launches_total", "graph", "graph_steps"),
        ("decode_launches_total", "kernels", "eager_steps"),
        ("allocations_after_warmup_total", "", "allocations_after_warmup"),
        ("compilations_after_warmup_total", "", "compilations_after_warmup"),
        ("prompt_tokens_total", "", "prompt_tokens"),
        ("cached_prompt_tokens_total", "", "cached_tokens"),
        ("computed_tokens_total", "", "computed_tokens"),
        ("generated_tokens_total", "", "generated_tokens"),
        ("recomputed_tokens_total", "", "recomputed_tokens"),
        ("preemptions_total", "", "preemptions"),
        ("queue_refusals_total", "queue_full", "refused_queue_full"),
        ("queue_refusals_total", "queue_time", "refused_queue_time"),
        ("kv_blocks_total", "stored", "stored_blocks"),
        ("kv_blocks_total", "removed", "removed_blocks"),
    ],
)
def test_each_number_of_the_lane_is_exported(name, label, field):
    assert scrape()[0][PREFIX + name, label] == getattr(STATS, field)


def test_what_the_core_said_at_its_start_is_exported():
    found, _, _ = scrape()
    assert found["pagelane_kv_usable_pages", ""] == 100
    assert found["pagelane_kv_page_size_tokens", ""] == 16
    assert found["pagelane_servable_length_tokens", ""] == 1600
    assert found["pagelane_memory_bytes", "kv_pool"] == 9
    assert found["pagelane_startup_seconds", "load"] == 1.5
    costs = scrape()[1]["pagelane_step_cost_seconds"].samples
    assert {(one.labels["rows"], one.labels["prompt_tokens"], one.value) for one in costs} == {
        ("1", "0", 0.003),
        ("1", "64", 0.007),
    }


def test_published_events_and_errors_are_exported():
    found, _, _ = scrape()
    assert found["pagelane_kv_blocks_published_total", "stored"] == 5
    assert found["pagelane_kv_blocks_published_total", "removed"] == 6
    assert found["pagelane_kv_event_errors_total", ""] == 7


def test_every_metric_has_prefix_help_and_a_fitting_name():
    for name, family in scrape()[1].items():
        assert name.startswith(PREFIX)
        assert family.documentation.endswith(".")
        assert not name.endswith(("_ms", "_mb"))
        if family.type == "counter":
            assert all(sample.name.endswith(("_total", "_created")) for sample in family.samples)


def test_reasons_are_there_before_they_occur():
    found, _, _ = scrape()
    for reason in ("stop", "length", "cancelled", "error"):
        assert found["pagelane_requests_finished_total", reason] == 0
    for reason in ("invalid", "capacity", "shutdown"):
        assert found["pagelane_requests_refused_total", reason] == 0


def test_latencies_are_observed_in_seconds_and_counted_up_to_each_bound():
    registry, requests = build_registry(Sources(lambda: STATS, READY, lambda: (0, 0, 0), lambda: 0))
    for seconds in (0.001, 0.004, 0.0041, 100.0):
        requests.inter_token_latency.observe(seconds)
    requests.time_to_first_token.observe(0.02)
    itl = families(registry)["pagelane_inter_token_latency_seconds"].samples
    buckets = {sample.labels["le"]: sample.value for sample in itl if sample.name.endswith("_bucket")}
    assert [buckets[bound] for bound in ("0.001", "0.002", "0.004", "0.006", "2.5", "+Inf")] == [1, 1, 2, 3, 3, 4]
    found = samples(registry)
    assert found["pagelane_inter_token_latency_seconds_count", ""] == 4
    assert found["pagelane_inter_token_latency_seconds_sum", ""] == pytest.approx(100.0091)
    assert found["pagelane_time_to_first_token_seconds_sum", ""] == 0.02


def test_two_registries_do_not_share_anything():
    _, _, first = scrape()
    first.refused.labels("invalid").inc()
    assert scrape()[0]["pagelane_requests_refused_total", "invalid"] == 0
