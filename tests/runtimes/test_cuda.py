"""The step on a GPU against the same step on the CPU."""

import pytest
import tiny_models
import torch
from tiny_models import ARCHITECTURES
from toys import drain, target_of

from slipstream.config import SamplingParams
from slipstream.drafters.draft_model import DraftModelDrafter
from slipstream.engine import Engine, EngineConfig
from slipstream.models.adapter import ATTENTION
from slipstream.runtimes.torch import TorchRuntime
from slipstream.types import StepRows

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
TREE = [-1, 0, 0, 1, 2, 4]
TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.08, torch.float16: 0.02}


def runtime(name: str, device: str, dtype: torch.dtype) -> TorchRuntime:
    model = tiny_models.build(tiny_models.config(name), ATTENTION, dtype=torch.float32)
    return TorchRuntime(model.to(dtype).to(device), name)


def logits(runtime: TorchRuntime) -> torch.Tensor:
    """Two requests of different length; a branch committed, then one step more."""
    cache = runtime.new_cache(3, 64)
    slots = [cache.allocate(), cache.allocate()]
    known = [list(range(5, 24)), [7, 8]]
    for slot, tokens in zip(slots, known, strict=True):
        chain = StepRows(
            slot=slot, tokens=tokens, parents=range(-1, len(tokens) - 1), logit_rows=[]
        )
        cache.commit(runtime.step([chain], cache), [slot], [range(len(tokens))])
    trees = [
        StepRows(slot=s, tokens=[9, 1, 2, 3, 4, 5], parents=TREE, logit_rows=range(6))
        for s in slots
    ]
    first = runtime.step(trees, cache)
    cache.commit(first, slots, [[0, 2, 4], [0]])
    more = [StepRows(slot=s, tokens=[6], parents=[-1], logit_rows=[0]) for s in slots]
    return torch.cat([first.logits, runtime.step(more, cache).logits]).cpu()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_step_on_the_gpu_is_the_step_on_the_cpu(name: str, dtype: torch.dtype) -> None:
    """Half precision against float32 with half-precision weights: its own rounding only."""
    if dtype != torch.float32 and name in ("gpt-oss, sinks, window 6", "mixtral"):
        pytest.skip("a router may choose another expert after rounding")
    reference = tiny_models.build(tiny_models.config(name), ATTENTION).to(dtype).float()
    want = logits(TorchRuntime(reference, name))
    got = logits(runtime(name, "cuda", dtype))
    assert got.dtype == torch.float32
    assert (got - want).abs().max() <= TOLERANCE[dtype] * want.abs().max()


@pytest.mark.parametrize("temperature", [0, 1])
def test_the_engine_runs_on_the_gpu(temperature: float) -> None:
    """The target as its own draft model: nearly all is accepted, rounding apart."""
    target, draft = (runtime("llama", "cuda", torch.float32) for _ in range(2))
    drafter = DraftModelDrafter(
        draft, target_of(tiny_models.VOCAB, max_model_len=128), sampled=True
    )
    config = EngineConfig(
        vocab_size=tiny_models.VOCAB, max_model_len=128, max_num_seqs=4, num_speculative_tokens=3
    )
    engine = Engine(runtime=target, config=config, drafter=drafter)
    params = SamplingParams(
        temperature=temperature,
        max_tokens=40,
        seed=1,
        top_p=0.9,
        repetition_penalty=1.1,
        logprobs=2,
    )
    requests = [engine.add([1 + i, 2, 3], params) for i in range(4)]
    drain(engine)
    assert all(len(r.output) == 40 for r in requests)
    assert engine.metrics.acceptance_rate > 0.95
