"""A server of one run goes when the run is over and everybody has left, and not before."""

from cli.farewell import Farewell


def test_a_run_that_goes_on_is_served_on() -> None:
    farewell = Farewell(linger_s=5, patience_s=50)
    assert not any(farewell.is_over(s, finished=False, open_streams=0) for s in (0, 10, 100))


def test_it_lingers_after_the_last_has_left() -> None:
    farewell = Farewell(linger_s=5, patience_s=50)
    looks = [(0, 2), (1, 1), (2, 0), (6, 0), (7, 0)]
    over = [farewell.is_over(s, finished=True, open_streams=streams) for s, streams in looks]
    assert over == [False, False, False, False, True]


def test_who_comes_meanwhile_is_waited_for_too() -> None:
    farewell = Farewell(linger_s=5, patience_s=50)
    looks = [(0, 0), (4, 1), (6, 0), (10, 0), (11, 0)]
    over = [farewell.is_over(s, finished=True, open_streams=streams) for s, streams in looks]
    assert over == [False, False, False, False, True]


def test_who_comes_to_ask_has_others_waited_for() -> None:
    farewell = Farewell(linger_s=5, patience_s=50)
    looks = [(0, 0), (4, 1), (8, 2), (12, 2), (13, 2)]
    over = [farewell.is_over(s, finished=True, open_streams=0, visits=n) for s, n in looks]
    assert over == [False, False, False, False, True]


def test_who_never_leaves_is_not_waited_for_without_end() -> None:
    farewell = Farewell(linger_s=5, patience_s=50)
    over = [farewell.is_over(s, finished=True, open_streams=1) for s in (10, 59, 60)]
    assert over == [False, False, True]


def test_a_run_that_a_restarted_server_takes_back_to_training_begins_anew() -> None:
    farewell = Farewell(linger_s=5, patience_s=50)
    assert not farewell.is_over(0, finished=True, open_streams=0)
    assert not farewell.is_over(10, finished=False, open_streams=0)
    assert not farewell.is_over(11, finished=True, open_streams=0)
    assert farewell.is_over(16, finished=True, open_streams=0)
