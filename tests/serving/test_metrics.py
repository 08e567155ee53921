"""Metrics in Prometheus's text format."""

from prometheus_client.parser import text_string_to_metric_families

from jaxgen.serving.metrics import Metrics

RUNNING = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc")
MODEL = {"model_name": 'a "model"', "engine": "0"}


def values(metrics: Metrics) -> dict:
    """Return the value of each series, by its name and its labels beside those of all metrics."""
    series = [sample for family in text_string_to_metric_families(metrics.text()) for sample in family.samples]
    assert all(MODEL.items() <= sample.labels.items() for sample in series)
    return {(each.name, *(each.labels[key] for key in each.labels.keys() - MODEL)): each.value for each in series}


def test_metrics_have_their_values():
    metrics = Metrics(MODEL["model_name"], lambda: dict.fromkeys(RUNNING, 0.5))
    metrics.count("generation_tokens_total", 4)
    metrics.count("request_error_total", status="400")
    metrics.observe("time_to_first_token_seconds", 0.3)
    metrics.observe("time_to_first_token_seconds", 700)
    found = values(metrics)
    assert [found[f"jaxgen:{name}",] for name in RUNNING] == [0.5] * 3
    assert found["jaxgen:generation_tokens_total",] == 4
    assert found["jaxgen:prompt_tokens_total",] == 0
    assert found["jaxgen:request_error_total", "400"] == 1
    bounds = ("0.25", "0.5", "640.0", "+Inf")
    assert [found["jaxgen:time_to_first_token_seconds_bucket", bound] for bound in bounds] == [0, 1, 1, 2]
    assert found["jaxgen:time_to_first_token_seconds_sum",] == 700.3
    assert (
        values(Metrics(MODEL["model_name"], lambda: dict.fromkeys(RUNNING, 0)))["jaxgen:generation_tokens_total",] == 0
    )
