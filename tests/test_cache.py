import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from slipstream.cache import LayerShape, TensorKV, TorchCache
from slipstream.types import StepOutput

SHAPES = [
    LayerShape(kv_heads=2, key_dim=3, value_dim=3),
    LayerShape(kv_heads=1, key_dim=4, value_dim=2),
]


def new_cache(slots: int = 3, max_length: int = 1000) -> TorchCache:
    cpu = torch.device("cpu")
    return TorchCache(SHAPES, slots=slots, max_length=max_length, dtype=torch.float32, device=cpu)


def step(*rows: list[int]) -> StepOutput:
    """KV in which every number tells its token: a list of them for each request, padded."""
    width = max(len(row) for row in rows)
    marks = torch.tensor([row + [-1] * (width - len(row)) for row in rows]).float()

    def fill(heads: int, dim: int, sign: int) -> torch.Tensor:
        head = torch.arange(heads)[:, None, None] / 8
        return sign * (marks[:, None, :, None] + head + torch.zeros(dim))

    return StepOutput(
        logits=torch.zeros(0, 1),
        new_kv=TensorKV(
            keys=[fill(s.kv_heads, s.key_dim, 1) for s in SHAPES],
            values=[fill(s.kv_heads, s.value_dim, -1) for s in SHAPES],
        ),
    )


def held(cache: TorchCache, slots: list[int]) -> list[list[float]]:
    """The tokens of each slot; every layer, head and dimension must agree on them."""
    keys, values = cache.view(slots)
    texts = []
    for b, slot in enumerate(slots):
        length = cache.lengths[slot]
        want = keys[0][b, 0, :length, 0]
        for layer, shape in enumerate(SHAPES):
            for head in range(shape.kv_heads):
                assert torch.equal(
                    keys[layer][b, head, :length],
                    (want + head / 8)[:, None].expand(-1, shape.key_dim),
                )
                assert torch.equal(
                    values[layer][b, head, :length],
                    -(want + head / 8)[:, None].expand(-1, shape.value_dim),
                )
        texts.append(want.tolist())
    return texts


def test_appends_the_first_rows_of_a_single_request() -> None:
    cache = new_cache()
    slot = cache.allocate()
    cache.commit(step([1, 2, 3]), [slot], [range(3)])
    cache.commit(step([4, 5]), [slot], [[0]])
    assert held(cache, [slot]) == [[1, 2, 3, 4]]


def test_commits_any_rows_of_many_requests() -> None:
    cache = new_cache()
    slots = [cache.allocate() for _ in range(3)]
    cache.commit(step([1, 2], [3], [4, 5, 6]), slots, [[0, 1], [0], [0, 2]])
    cache.commit(step([7], [8, 9, 10]), [slots[2], slots[0]], [[], [0, 2]])
    assert held(cache, slots) == [[1, 2, 8, 10], [3], [4, 6]]
    cache.check()


def test_scattering_equals_appending() -> None:
    one, other = new_cache(), new_cache()
    for cache in (one, other):
        cache.allocate()
    out = step([1, 2, 3])
    one.commit(out, [0], [range(2)])
    other._scatter(out.new_kv, [0], [range(2)])
    other.lengths[0] = 2
    assert held(one, [0]) == held(other, [0]) == [[1, 2]]


def test_committing_nothing() -> None:
    cache = new_cache()
    slot = cache.allocate()
    cache.commit(step([1]), [slot], [[]])
    assert cache.lengths[slot] == 0
    assert cache.view([slot])[0][0].shape[2] == 0


def test_grows_by_doubling_and_keeps_what_it_holds() -> None:
    cache = new_cache(slots=2, max_length=1000)
    a, b = cache.allocate(), cache.allocate()
    small = cache.bytes
    text = list(range(256))
    cache.commit(step(text), [b], [range(256)])
    assert cache.bytes == small
    cache.commit(step([7], [8]), [a, b], [[0], [0]])
    assert cache.bytes == 2 * small
    cache.commit(step(list(range(700))), [a], [range(700)])
    assert cache.bytes < 4 * small  # never above max_length
    assert held(cache, [a, b]) == [[7, *range(700)], [*text, 8]]
    cache.check()


@pytest.mark.parametrize("call", [1, 2, 3, 4])
def test_memory_that_runs_out_while_growing_leaves_the_cache_usable(
    call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = new_cache(slots=1)
    slot = cache.allocate()
    text = list(range(256))
    cache.commit(step(text), [slot], [range(256)])
    calls, new_zeros = [], torch.Tensor.new_zeros

    def failing(*args: object, **kwargs: object) -> torch.Tensor:
        calls.append(args)
        if len(calls) == call:
            raise MemoryError("planted")
        return new_zeros(*args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(torch.Tensor, "new_zeros", failing)
    with pytest.raises(MemoryError):
        cache.commit(step([7]), [slot], [[0]])
    assert held(cache, [slot]) == [text]
    cache.commit(step([7]), [slot], [[0]])  # again, now with memory enough
    assert held(cache, [slot]) == [[*text, 7]]
    cache.check()


def test_holds_exactly_max_length() -> None:
    cache = new_cache(slots=1, max_length=5)
    slot = cache.allocate()
    cache.commit(step([1, 2, 3, 4, 5]), [slot], [range(5)])
    with pytest.raises(AssertionError):
        cache.commit(step([6]), [slot], [[0]])
    assert held(cache, [slot]) == [[1, 2, 3, 4, 5]]


def test_neighbouring_slots_are_read_without_a_copy_and_others_with_one() -> None:
    cache = new_cache(slots=4)
    for slot in [cache.allocate() for _ in range(4)]:
        cache.commit(step([slot, 10 + slot]), [slot], [range(1 + slot % 2)])
    assert held(cache, [1, 2, 3]) == [[1, 11], [2], [3, 13]]
    assert held(cache, [3, 0]) == [[3, 13], [0]]
    assert held(cache, [2, 1]) == [[2], [1, 11]]
    together, apart = cache.view([1, 2])[0][0], cache.view([0, 2])[0][0]
    assert together.untyped_storage().data_ptr() == cache._keys[0].untyped_storage().data_ptr()
    assert apart.untyped_storage().data_ptr() != cache._keys[0].untyped_storage().data_ptr()


def test_a_released_slot_comes_back_empty_and_the_lowest_first() -> None:
    cache = new_cache()
    for slot in [cache.allocate() for _ in range(3)]:
        cache.commit(step([slot]), [slot], [[0]])
    cache.release(2)
    cache.release(0)
    assert cache.free_slots == 2
    assert cache.lengths == [0, 1, 0]
    assert cache.allocate() == 0
    assert cache.allocate() == 2
    cache.check()
    with pytest.raises(AssertionError):
        cache.allocate()


def test_releasing_twice_is_a_fault() -> None:
    cache = new_cache()
    slot = cache.allocate()
    cache.release(slot)
    with pytest.raises(AssertionError):
        cache.release(slot)


def test_check_finds_kv_in_a_free_slot() -> None:
    cache = new_cache()
    cache.lengths[1] = 3
    with pytest.raises(AssertionError):
        cache.check()


@settings(max_examples=40)
@given(st.data())
def test_any_history_holds_what_was_committed(data: st.DataObject) -> None:
    cache = new_cache(slots=3, max_length=600)
    texts: dict[int, list[float]] = {}
    token = 0
    for _ in range(data.draw(st.integers(1, 8))):
        if cache.free_slots and (not texts or data.draw(st.booleans())):
            texts[cache.allocate()] = []
        elif data.draw(st.integers(0, 5)) == 0:
            slot = data.draw(st.sampled_from(sorted(texts)))
            cache.release(slot)
            del texts[slot]
        if not texts:
            continue
        slots = data.draw(st.permutations(sorted(texts)))[: data.draw(st.integers(1, 3))]
        rows, kept = [], []
        for slot in slots:
            count = data.draw(st.sampled_from([1, 2, 5, 150]))
            rows.append(list(range(token, token + count)))
            keep = data.draw(st.sets(st.integers(0, min(count, 5) - 1)))
            kept.append(sorted(keep) if count < 150 else list(range(count)))
            token += count
            if len(texts[slot]) + len(kept[-1]) > 600:
                kept[-1] = []
            texts[slot] += [float(rows[-1][i]) for i in kept[-1]]
        cache.commit(step(*rows), slots, kept)
        cache.check()
        assert held(cache, slots) == [texts[slot] for slot in slots]
    order = sorted(texts)
    assert not order or held(cache, order) == [texts[slot] for slot in order]
