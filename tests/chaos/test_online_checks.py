"""What a campaign of the online service calls a violation."""

from chaos.online.checks import ENGINE_GONE_S, unexplained
from chaos.online.customers import Diary


def test_only_a_kill_of_the_engine_shortly_before_explains_a_stream_without_engine() -> None:
    diary = Diary(engine_kills=[100.0, 500.0])
    diary.engine_gone = [100.0, 101.5, 100.0 + ENGINE_GONE_S, 500.2]
    assert unexplained(diary) == 0
    diary.engine_gone += [99.0, 100.1 + ENGINE_GONE_S, 499.9]
    assert unexplained(diary) == 3
    assert unexplained(Diary(engine_gone=[1.0])) == 1
