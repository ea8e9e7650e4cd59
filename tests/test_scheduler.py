from test_cache import new_cache, step
from toys import request_of

from slipstream.cache import Cache
from slipstream.request import Request
from slipstream.scheduler import Scheduler


def commit(cache: Cache, request: Request, count: int) -> None:
    assert request.slot is not None
    cache.commit(step([0] * count), [request.slot], [range(count)])


def test_requests_wait_for_a_slot_in_order() -> None:
    cache = new_cache(slots=2)
    scheduler = Scheduler(cache)
    requests = [request_of([1], i) for i in range(3)]
    for request in requests:
        scheduler.add(request)
    assert len(scheduler) == 3
    assert scheduler.schedule() == requests[:2]
    assert [r.slot for r in requests] == [0, 1, None]
    scheduler.remove(requests[0])
    assert requests[0].slot is None
    assert scheduler.schedule() == [requests[2], requests[1]]  # by slot
    assert len(scheduler) == 2


def test_a_prompt_is_prefilled_by_itself_and_the_others_decode_together() -> None:
    cache = new_cache(slots=3)
    scheduler = Scheduler(cache)
    short, long, longer = (request_of([1] * n, n) for n in (1, 5, 6))
    for request in (short, long, longer):
        scheduler.add(request)
    assert scheduler.schedule() == [long]
    assert scheduler.pending(long) == 5
    commit(cache, long, 3)
    assert scheduler.schedule() == [long]
    commit(cache, long, 1)  # all but the newest
    assert scheduler.schedule() == [longer]
    commit(cache, longer, 5)
    assert scheduler.schedule() == [short, long, longer]


def test_nothing_to_do() -> None:
    assert Scheduler(new_cache()).schedule() == []


def test_removing_a_waiting_or_unknown_request() -> None:
    cache = new_cache(slots=1)
    scheduler = Scheduler(cache)
    first, second = request_of([1], 0), request_of([1], 1)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.schedule()
    scheduler.remove(second)
    scheduler.remove(second)
    assert scheduler.schedule() == [first]
    scheduler.remove(first)
    scheduler.remove(first)
    assert cache.free_slots == 1
    assert cache.lengths == [0]
