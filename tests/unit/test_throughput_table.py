"""The page of the throughput gate says what its committed results say."""

from __future__ import annotations

import copy

import pytest

from tests import pages
from tests.gates import throughput_table

TABLES = throughput_table.tables()


@pytest.mark.parametrize("name", TABLES)
def test_the_page_says_what_the_results_say(name: str) -> None:
    found = pages.between(name).search(throughput_table.PAGE.read_text(encoding="utf-8"))
    assert found and found[0] == TABLES[name], "python -m tests.gates.throughput_table writes it again"


def test_streams_that_all_came_in_bursts_have_no_rate() -> None:
    power = copy.deepcopy(throughput_table.load("throughput_power"))
    row = power["generators_limit"]["paced_at_57_tok_s"][0]
    row.update(decode_tok_s=None, bursts=row["streams"], seconds=4.0)
    table = throughput_table.render_generator(power)
    assert f"| {row['streams']} | {row['events_s']} | | " in table
    assert "| came in bursts |" in table


def test_a_result_that_counts_no_bursts_has_no_column_for_them() -> None:
    power = copy.deepcopy(throughput_table.load("throughput_power"))
    for row in power["generators_limit"]["paced_at_57_tok_s"]:
        row.pop("bursts", None)
    assert "bursts" not in throughput_table.render_generator(power)


def test_numbers_that_nothing_explains_are_named() -> None:
    beside = copy.deepcopy(throughput_table.load("throughput_beside_vllm"))
    alone = beside["scripted"]["1"]["ttft_ms"]
    alone.update(difference=0.04, rounds_differ=0.5, within_2_percent=False)
    assert "TTFT, median, ms (scripted, streams: 1)" in throughput_table.render_beside(beside), "its times are known"
