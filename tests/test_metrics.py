from toys import ToyDrafter, ToyRuntime, drain, toy_engine

from slipstream.config import SamplingParams
from slipstream.metrics import Clock, Metrics
from slipstream.types import ROOT, Draft, Verdict, chain


def observe(metrics: Metrics, draft: Draft, path: list[int], emitted: int | None = None) -> None:
    verdict = Verdict(path=path, next_token=0, origin="bonus")
    metrics.observe(draft, verdict, len(path) + 1 if emitted is None else emitted)


def test_nothing_seen() -> None:
    metrics = Metrics()
    assert metrics.mean_tokens_per_step == metrics.acceptance_rate == 0
    assert metrics.acceptance_by_position == []


def test_plain_decoding_has_one_token_per_step() -> None:
    metrics = Metrics()
    for _ in range(3):
        observe(metrics, Draft(), [])
    assert metrics.mean_tokens_per_step == 1
    assert metrics.drafted == 0
    assert metrics.acceptance_by_position == []


def test_acceptance_by_position_counts_what_was_reached() -> None:
    metrics = Metrics()
    observe(metrics, chain([1, 2, 3]), [0, 1, 2])
    observe(metrics, chain([1, 2, 3]), [0])
    observe(metrics, chain([1, 2, 3]), [])
    observe(metrics, chain([1]), [0])
    assert metrics.tried_at == [4, 2, 1]
    assert metrics.accepted_at == [3, 1, 1]
    assert metrics.acceptance_by_position == [0.75, 0.5, 1.0]
    assert metrics.acceptance_rate == 5 / 10
    assert metrics.mean_tokens_per_step == 9 / 4


def test_positions_of_a_tree_are_depths() -> None:
    """A position counts as tried where the tree has a token to try."""
    metrics = Metrics()
    tree = Draft(tokens=[1, 2, 3], parents=[ROOT, ROOT, 0])
    observe(metrics, tree, [1])
    assert (metrics.tried_at, metrics.accepted_at) == ([1], [1])
    observe(metrics, tree, [0])
    assert (metrics.tried_at, metrics.accepted_at) == ([2, 1], [2, 0])


def test_as_dict_is_what_the_json_output_shows() -> None:
    metrics = Metrics()
    observe(metrics, chain([1, 2]), [0])
    assert metrics.as_dict() == {
        "mean_tokens_per_step": 2.0,
        "acceptance_rate": 0.5,
        "acceptance_by_position": [1.0, 0.0],
        "steps": 1,
        "drafted_tokens": 2,
        "accepted_tokens": 1,
    }


def test_an_engines_metrics_are_the_sum_of_its_requests() -> None:
    model = ToyRuntime(5, seed=1)
    engine = toy_engine(model, ToyDrafter(model, [ROOT, ROOT, 0], sampled=False), 3)
    requests = [engine.add([1, 2], SamplingParams(seed=i, max_tokens=9)) for i in range(3)]
    drain(engine)
    for name in ("steps", "emitted", "drafted", "accepted"):
        assert getattr(engine.metrics, name) == sum(getattr(r.metrics, name) for r in requests)
    assert engine.metrics.emitted == 27


def test_clock_adds_up() -> None:
    clock = Clock()
    clock.add(1, 2, 3)
    clock.add(0.5, 0, 0)
    assert (clock.draft, clock.forward, clock.other) == (1.5, 2, 3)


def test_the_engine_keeps_time() -> None:
    engine = toy_engine(ToyRuntime(5))
    engine.add([1], SamplingParams(max_tokens=3))
    drain(engine)
    assert engine.clock.forward > 0
    assert engine.clock.other > 0
