"""The bench of the relays in small: it has the fields it promises, and says what it cannot measure."""

from __future__ import annotations

import pytest

from laminar.bench import BENCHES
from laminar.bench.relay import PARTS, bench_relay
from laminar.cli.bench import bench
from laminar.errors import UserError
from laminar.weights.transport import installed


def test_figures_are_measured_for_each_transport() -> None:
    figures = bench_relay(only=["publish", "chain"], nbytes=8 << 20, repeats=1)
    assert figures["pull_copies"] == 0
    assert figures["publish_ratio"] > 0 and figures["pull_us"] > 0
    for transport in installed():
        seconds = figures["chain_seconds"][transport]
        assert list(seconds) == ["1", "2", "4", "8"]
        assert all(took > 0 for took in seconds.values())
    assert figures["chain_rate_over_copy"] > 0


def test_what_needs_emulated_hosts_is_none_with_a_reason_where_there_are_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("laminar.bench.relay.why_not", lambda: "network namespaces need root")
    figures = bench_relay(only=["links", "changes"])
    for field in PARTS["links"].fields + PARTS["changes"].fields:
        assert figures[field] is None
        assert figures[f"{field}_reason"] == "network namespaces need root"


def test_what_fails_by_one_transport_is_none_and_says_which(monkeypatch: pytest.MonkeyPatch) -> None:
    def by(transport: str, nbytes: int, repeats: int, namespace: str | None) -> dict[str, object]:
        raise TimeoutError(f"nothing moved over {transport}")

    monkeypatch.setattr("laminar.bench.relay.measure_chain", by)
    figures = bench_relay(only=["chain"])
    assert figures["chain_seconds"] is None
    assert "tcp: TimeoutError: nothing moved over tcp" in figures["chain_seconds_reason"]


def test_a_part_that_is_not_there_is_named() -> None:
    with pytest.raises(UserError, match="no part `chains`; there are: publish, links"):
        bench_relay(only=["chains"])


def test_the_command_measures_only_the_parts_it_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(BENCHES, "parts", lambda *, only=(): {"parts": list(only)})
    assert bench("parts", only="links, changes", json=True)["parts"] == ["links", "changes"]
    monkeypatch.setitem(BENCHES, "whole", lambda: {})
    with pytest.raises(UserError, match="bench `whole` has no --only"):
        bench("whole", only="links")
