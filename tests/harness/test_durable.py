"""`diloco bench journal`: one tiny bench from end to end."""

from __future__ import annotations

import threading
from pathlib import Path

from harness.durable import DurableBench


def test_a_bench_measures_both_and_kills_and_restarts(tmp_path: Path) -> None:
    lines: list[str] = []
    bench = DurableBench(
        out=tmp_path,
        params=1000,
        pairs=1,
        pushers=2,
        merges=24,
        limit_s=120.0,
        stop=threading.Event(),
        tell=lines.append,
    )
    result = bench.run()
    assert result.pushes == 48
    assert (len(result.with_journal_per_s), len(result.without_per_s)) == (1, 1)
    assert min(result.with_journal_per_s + result.without_per_s) > 0
    assert result.ratio_median > 0
    assert result.recovery_merges >= 24, "all that was merged since the birth"
    assert result.recovery_s > 0
    assert not list(tmp_path.glob("journal-*")), "run directories are removed"
