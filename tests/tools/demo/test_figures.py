"""What the demo prints, from what was measured."""

import io

from kvrouter.tools.demo.run import Counted, Progress, source_table, speedup, ttft_line
from kvrouter.tools.demo.workload import Reply

EXPOSITION = """\
# HELP vllm:prompt_tokens_by_source_total Prompt tokens by source.
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_compute"} 30.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="local_cache_hit"} 50.0
vllm:prompt_tokens_by_source_total{engine="0",model_name="m",source="external_kv_transfer"} 20.0
vllm:prompt_tokens_by_source_created{engine="0",model_name="m",source="local_compute"} 1.7e+09
kvsim:wrong_blocks_total{engine="0",model_name="m"} 2.0
"""


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_an_engines_own_counters_say_where_its_tokens_came_from() -> None:
    counted = Counted.read(EXPOSITION)
    assert counted == Counted(computed=30, own=50, store=20, wrong_blocks=2)
    assert counted.share(counted.own + counted.store) == 0.7


def test_of_nothing_every_share_is_zero() -> None:
    assert Counted().share(0) == 0.0


def test_the_table_sums_up_the_engines() -> None:
    engines = {"a": Counted(1000, 2, 3), "b": Counted(1, 0, 0)}
    table = source_table(engines, {"a": "(dead)"}).splitlines()
    assert table[1].split() == ["a", "1,000", "2", "3", "(dead)"]
    assert table[3].split() == ["all", "1,001", "2", "3"]


def test_times_are_those_of_answers_that_went_well() -> None:
    replies = [Reply(0.1, 100), Reply(0.3, 100), Reply(9.0, 0, "broke off")]
    assert "TTFT median  200.0 ms   p95  290.0 ms" in ttft_line("warm", replies)
    assert "no answer" in ttft_line("warm", [Reply(0.0, 0, "refused")])


def test_the_gain_is_a_ratio_of_medians() -> None:
    assert speedup([Reply(0.4, 1)], [Reply(0.1, 1), Reply(0.1, 1), Reply(3.0, 1)]) == 4.0
    assert speedup([Reply(0.4, 1)], [Reply(0.0, 0, "refused")]) == 0.0


def test_a_pipe_sees_plain_lines_and_no_counting() -> None:
    out = io.StringIO()
    progress = Progress(out)
    progress.step("cold")
    progress.count(1, 2)
    progress.line("done")
    assert "\x1b" not in out.getvalue()
    assert "\r" not in out.getvalue()
    assert [line.split("] ")[-1] for line in out.getvalue().splitlines()] == ["cold", "done"]


def test_a_terminal_sees_one_line_that_moves() -> None:
    out = Terminal()
    progress = Progress(out)
    progress.step("cold")
    progress.count(2, 2)
    progress.line("done")
    assert "cold 2/2" in out.getvalue()
    assert out.getvalue().endswith("\r\x1b[Kdone\n")
    assert out.getvalue().count("\n") == 1
