"""The Python API: text in, text out. Names follow vLLM."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from slipstream.config import (
    LOGPROBS_MODES,
    RuntimeConfig,
    SamplingParams,
    require_integer,
    unknown,
)
from slipstream.drafters import SpeculativeConfig, Target, parse
from slipstream.engine import Engine, EngineConfig
from slipstream.errors import SlipstreamError
from slipstream.models.load import load
from slipstream.models.sources import DEFAULT_MODEL, say
from slipstream.runtimes import Runtime
from slipstream.stream import CompletionOutput, RequestOutput, Stream

__all__ = ["LLM", "CompletionOutput", "Message", "Prompt", "RequestOutput", "Stream"]

Prompt = str | Mapping[str, Any]
Message = Mapping[str, Any]


class LLM:
    """A target model, possibly with a drafter.

    model: hub id, folder, GGUF file, or the built-in default. runtime, device, dtype, quantization,
    threads, kv_cache_dtype: see ``config.RuntimeConfig``.
    max_model_len: tokens of prompt and answer together. max_num_seqs: requests in flight.
    speculative_config: {"method": "ngram" | "eagle3" | …, "num_speculative_tokens": K, …}, or a
    list of several that draft together; None decodes plainly.
    logprobs_mode: "raw_logprobs" or "processed_logprobs".
    notify: is told in a line what takes time (default: stderr).
    """

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        speculative_config: SpeculativeConfig | None = None,
        runtime: str = "auto",
        device: str = "auto",
        dtype: str = "auto",
        quantization: str = "none",
        threads: int | None = None,
        kv_cache_dtype: str = "auto",
        max_model_len: int | None = None,
        max_num_seqs: int = 8,
        logprobs_mode: str = "raw_logprobs",
        notify: Callable[[str], None] = say,
    ) -> None:
        if speculative_config is not None:
            parse(speculative_config)  # what is wrong with it is said before anything is loaded
        if logprobs_mode not in LOGPROBS_MODES:
            raise unknown("logprobs_mode", logprobs_mode, LOGPROBS_MODES)
        require_integer("max_num_seqs", max_num_seqs, 1)
        if max_model_len is not None:
            require_integer("max_model_len", max_model_len, 2)
        config = RuntimeConfig(
            runtime=runtime,
            device=device,
            dtype=dtype,
            quantization=quantization,
            threads=threads,
            kv_cache_dtype=kv_cache_dtype,
        )
        self._notify = notify
        self.runtime_config = config
        self._load = lambda name: load(name, config, notify=notify)
        self.model = self._load(model)
        self.tokenizer = self.model.tokenizer
        longest = self.model.runtime.max_length
        if max_model_len is not None and max_model_len > longest:
            raise SlipstreamError(
                f"max_model_len {max_model_len} is more than {model} was made for: {longest} tokens"
            )
        self._max_model_len = max_model_len or longest
        self._max_num_seqs = max_num_seqs
        self._logprobs_mode = logprobs_mode
        self.engine = self._engine(speculative_config)

    def with_speculation(self, speculative_config: SpeculativeConfig | None) -> LLM:
        """Another LLM on the same weights, with another drafter or none."""
        other = copy.copy(self)
        other.engine = self._engine(speculative_config)
        return other

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Complete prompts; answers in their order.

        A prompt: a string, {"prompt": string} or {"prompt_token_ids": [...]}.

        on_finish: called with each answer as it is ready (progress bars, saving as one goes).
        """
        listed = [prompts] if isinstance(prompts, (str, Mapping)) else list(prompts)
        return self._run([self._encode(p) for p in listed], listed, sampling_params, on_finish)

    def chat(
        self,
        messages: Sequence[Message] | Sequence[Sequence[Message]],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        *,
        on_finish: Callable[[RequestOutput], None] | None = None,
    ) -> list[RequestOutput]:
        """Answer one conversation, or several, through the model's chat template."""
        many = [messages] if messages and isinstance(messages[0], Mapping) else messages
        tokens = [self.chat_tokens(conversation) for conversation in many]  # type: ignore[arg-type]
        return self._run(tokens, [None] * len(tokens), sampling_params, on_finish)

    def stream(
        self, prompt: Prompt | Sequence[Message], sampling_params: SamplingParams | None = None
    ) -> Stream:
        """The answer as it comes: iterate for pieces of text, then take ``.output()``.

        prompt: as for ``generate``, or a conversation as for ``chat``.
        """
        if isinstance(prompt, (str, Mapping)):
            tokens = self._encode(prompt)
        else:
            tokens = self.chat_tokens(prompt)
        text = prompt if isinstance(prompt, str) else None
        return self._start(tokens, text, sampling_params or SamplingParams())

    def chat_tokens(self, messages: Sequence[Message]) -> list[int]:
        """Token ids of a conversation, ready for the assistant's turn."""
        if not messages:
            raise SlipstreamError("the conversation is empty: give at least one message")
        if not self.tokenizer.chat_template:
            raise SlipstreamError(f"{self.model.name} has no chat template: use generate, or --raw")
        try:
            tokens = self.tokenizer.apply_chat_template(
                list(messages), add_generation_prompt=True, tokenize=True, return_dict=False
            )
        except Exception as error:  # templates raise what they like
            raise SlipstreamError(
                f"{self.model.name}'s chat template refuses these messages: {error}"
            ) from error
        return list(tokens)

    def _encode(self, prompt: Prompt) -> list[int]:
        if isinstance(prompt, str):
            if not prompt:
                raise SlipstreamError("the prompt is empty: give some text")
            try:
                return list(self.tokenizer(prompt)["input_ids"])
            except (TypeError, UnicodeError):
                raise SlipstreamError("the prompt is not text: encode it in UTF-8") from None
        if set(prompt) == {"prompt"} and isinstance(prompt["prompt"], str):
            return self._encode(prompt["prompt"])
        if set(prompt) != {"prompt_token_ids"}:
            given = ", ".join(map(str, prompt))
            raise unknown("prompt keys", given, ("prompt", "prompt_token_ids"))
        ids = prompt["prompt_token_ids"]
        if not isinstance(ids, Sequence) or isinstance(ids, str):
            raise SlipstreamError(f"prompt_token_ids must be a list of token ids, got {ids!r}")
        return list(ids)

    def _run(
        self,
        prompts: Sequence[list[int]],
        texts: Sequence[object],
        sampling_params: SamplingParams | Sequence[SamplingParams] | None,
        on_finish: Callable[[RequestOutput], None] | None,
    ) -> list[RequestOutput]:
        params = _each(sampling_params, len(prompts))
        streams: dict[int, Stream] = {}
        try:
            for tokens, text, p in zip(prompts, texts, params, strict=True):
                stream = self._start(tokens, text if isinstance(text, str) else None, p)
                streams[stream.request.request_id] = stream
            while not all(stream.finished for stream in streams.values()):
                for request in self.engine.step():
                    if request.request_id not in streams:  # of somebody who streams beside us
                        continue
                    stream = streams[request.request_id]
                    deque(stream.advance(), maxlen=0)
                    if stream.finished and on_finish is not None:
                        on_finish(stream.output())
        finally:
            for stream in streams.values():
                stream.close()
        return [stream.output() for stream in streams.values()]

    def _start(self, tokens: list[int], text: str | None, params: SamplingParams) -> Stream:
        request = self.engine.add(tokens, params)
        return Stream(engine=self.engine, request=request, tokenizer=self.tokenizer, prompt=text)

    def _engine(self, speculative_config: SpeculativeConfig | None) -> Engine:
        model = self.model
        speculation = parse(speculative_config) if speculative_config is not None else None
        drafter = None
        if speculation is not None:
            target = Target(
                name=model.name,
                runtime=model.runtime,
                tokenizer=model.tokenizer,
                vocab_size=model.vocab_size,
                max_num_seqs=self._max_num_seqs,
                max_model_len=self._max_model_len,
                load=self._load_drafter,
                notify=self._notify,
            )
            drafter = speculation.drafter.build(target)
        config = EngineConfig(
            vocab_size=model.vocab_size,
            max_model_len=self._max_model_len,
            eos_token_ids=model.eos_token_ids,
            max_num_seqs=self._max_num_seqs,
            num_speculative_tokens=speculation.drafter.num_speculative_tokens if speculation else 0,
            rejection_sample_method=speculation.rejection_sample_method
            if speculation
            else "standard",
            logprobs_mode=self._logprobs_mode,
        )
        return Engine(runtime=model.runtime, config=config, drafter=drafter)

    def _load_drafter(self, name: str) -> tuple[Runtime, Any]:
        """A draft model; the target's own weights are not loaded twice."""
        model = self.model if name == self.model.name else self._load(name)
        return model.runtime, model.tokenizer


def _each(
    params: SamplingParams | Sequence[SamplingParams] | None, count: int
) -> Sequence[SamplingParams]:
    if params is None or isinstance(params, SamplingParams):
        return [params or SamplingParams()] * count
    if len(params) != count:
        raise SlipstreamError(
            f"{len(params)} sampling parameters for {count} prompts: give one each"
        )
    return params
