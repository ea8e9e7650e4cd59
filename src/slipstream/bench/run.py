"""``slipstream bench``: precision by precision, cell by cell, round by round.

Speed is only ever compared between two sides of one round: where the machine's own speed drifts, it
hits both.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from itertools import product
from pathlib import Path
from typing import Any

import torch

from slipstream.bench import machine
from slipstream.bench.cell import Cell, PeerSide, Side
from slipstream.bench.curve import cost_curve, reached_gb_s, stream_gb_s
from slipstream.bench.settings import PLAIN, Settings, precision_of
from slipstream.bench.suite import Prompt, Question, prompts_of
from slipstream.config import RuntimeConfig
from slipstream.errors import SlipstreamError
from slipstream.llm import LLM
from slipstream.models.sources import DEFAULT_MODEL, default_gguf, resolve, say
from slipstream.proof.run import Progress, silent
from slipstream.runtimes import Runtime
from slipstream.runtimes.torch import find_device


@dataclass(kw_only=True)
class Bench:
    """``run`` measures everything and returns the document that ``--json`` prints.

    save: called with the document after every round and every part of the cost curve: should the
    run end early, what was measured is there ("complete" tells).
    """

    settings: Settings
    questions: Sequence[Question]
    progress: Progress = silent
    notify: Callable[[str], None] = say
    save: Callable[[dict[str, Any]], None] = lambda document: None
    document: dict[str, Any] = field(init=False)

    def run(self) -> dict[str, Any]:
        device = find_device(self.settings.precisions[0].device)
        self.document = {
            "complete": False,
            "model": self.settings.model,
            "settings": asdict(self.settings),
            "runs": [],
            "skipped": [],
            "cost_curve": {},
            "cost_curve_batched": {},
            "bandwidth_gb_s": {"stream": None, "reached": {}},
            "peak_memory_gb": {},
            "machine": machine.machine(device) | {"runtimes": {}},
            "provenance": machine.provenance(),
        }
        for config in self.settings.precisions:
            machine.reset_peak_memory()
            self._precision(config, device)
            gc.collect()  # these weights go before the next ones come
        self.document["complete"] = True
        self.save(self.document)
        return self.document

    def _precision(self, config: RuntimeConfig, device: torch.device) -> None:
        """Load the model at one precision and measure it."""
        settings = self.settings
        plain = LLM(
            settings.model,
            **asdict(config),
            max_model_len=settings.max_model_len,
            max_num_seqs=max(settings.concurrencies),
            notify=self.notify,
        )
        runtime = plain.model.runtime
        self._check_curve(runtime)
        name = precision_of(config, runtime)
        self.document["machine"]["runtimes"][name] = machine.runtime_facts(runtime)
        sides = [Side(method=PLAIN, engine=plain.engine)]
        for method, speculation in settings.methods.items():
            sides.append(Side(method=method, engine=plain.with_speculation(speculation).engine))
        prompts = prompts_of(plain, self.questions, settings.all_turns, settings.max_tokens)
        for temperature, concurrency in product(settings.temperatures, settings.concurrencies):
            with ExitStack() as stack:
                peers = []
                if temperature == 0 and concurrency == 1:
                    peers = self._start_peers(stack, name, runtime)
                self._cell(name, sides, peers, prompts, temperature, concurrency)
        self._curves(name, runtime)
        self.document["peak_memory_gb"][name] = machine.peak_memory_gb()
        bandwidth = self.document["bandwidth_gb_s"]
        bandwidth["reached"][name] = reached_gb_s(runtime)
        bandwidth["stream"] = max(bandwidth["stream"] or 0, stream_gb_s(device, _threads(runtime)))

    def _cell(
        self,
        precision: str,
        sides: Sequence[Side],
        peers: Sequence[PeerSide],
        prompts: Sequence[Prompt],
        temperature: float,
        concurrency: int,
    ) -> None:
        rounds, runs = self.settings.rounds, self.document["runs"]
        done = len(runs)
        setting = {"precision": precision, "temperature": temperature, "concurrency": concurrency}
        what = f"{precision}, temperature {temperature:g}, {concurrency} at once"
        with self.progress(what, rounds * (len(sides) + len(peers)) * len(prompts)) as advance:
            cell = Cell(
                sides=sides,
                peers=peers,
                prompts=prompts,
                params=lambda number: self.settings.params(number, temperature),
                concurrency=concurrency,
                notify=self.notify,
                advance=advance,
            )

            def on_round() -> None:
                runs[done:] = [setting | run for run in cell.figures()]
                self.save(self.document)

            cell.measure(rounds, on_round)

    def _start_peers(self, stack: ExitStack, precision: str, runtime: Runtime) -> list[PeerSide]:
        """Each peer twice, plain and speculative; what can't be had is noted and left out."""
        if not self.settings.peers:
            return []
        from slipstream.bench import peers

        model, found = self.settings.model, []
        gguf = Path(model).expanduser() if model.lower().endswith(".gguf") else None
        if model == DEFAULT_MODEL:
            gguf = default_gguf(self.notify)
        for (name, path), speculative in product(self.settings.peers.items(), (False, True)):
            try:
                peer = peers.start(
                    name,
                    path,
                    model_folder=resolve(model, notify=self.notify),
                    gguf=gguf,
                    precision=precision,
                    threads=_threads(runtime),
                    speculative=speculative,
                    max_tokens_hint=self.settings.max_tokens,
                )
            except SlipstreamError as error:
                method = "speculative" if speculative else PLAIN
                self.notify(f"{name}, {method}, {precision} is left out: {error}")
                skipped = {"engine": name, "method": method, "precision": precision}
                self.document["skipped"].append(skipped | {"reason": str(error)})
            else:
                found.append(PeerSide(name=name, peer=stack.enter_context(peer)))
        return found

    def _check_curve(self, runtime: Runtime) -> None:
        if (curve := self.settings.curve) is None:
            return
        context, rows = max(curve.contexts), max(curve.rows)
        if context + rows > runtime.max_length:
            raise SlipstreamError(
                f"--context-lengths {context} with {rows} rows is more than the "
                f"{runtime.max_length} tokens that {self.settings.model} was made for: give less"
            )

    def _curves(self, precision: str, runtime: Runtime) -> None:
        """``cost_curve``: precision → context → rows → ms of a single request;
        ``cost_curve_batched``: precision → batch → context → rows → ms of the others."""
        if (curve := self.settings.curve) is None:
            return
        steps = list(product(curve.batches, curve.contexts))
        with self.progress(f"{precision}, cost curve", len(steps)) as advance:
            for batch, context in steps:
                found = cost_curve(runtime, context, curve.rows, batch=batch)
                if batch == 1:
                    place = self.document["cost_curve"].setdefault(precision, {})
                else:
                    batched = self.document["cost_curve_batched"].setdefault(precision, {})
                    place = batched.setdefault(str(batch), {})
                place[str(context)] = {str(count): value for count, value in found.items()}
                self.save(self.document)
                advance()


def _threads(runtime: Runtime) -> int:
    return int(getattr(runtime, "threads", torch.get_num_threads()))
