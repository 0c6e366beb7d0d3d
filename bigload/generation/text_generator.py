"""Answers of a dispatched model of transformers, by its own `generate`, token by token."""

from __future__ import annotations

import inspect
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from itertools import takewhile
from typing import Any, NamedTuple

import torch
from torch import nn

from bigload.errors import NotEnoughMemoryError, OptionError
from bigload.generation.planned_model import PlannedModel, stats_of, synchronize
from bigload.generation.report import Answer, Finish
from bigload.generation.text_pieces import TextPieces
from bigload.loading.memory_errors import is_refusal
from bigload.machine.memory.ram import available_memory
from bigload.planning.workload import PREFILL_CHUNK
from bigload.runtime.hooks.align_devices import AlignDevicesHook
from bigload.runtime.hooks.hooks import add_hook_to_module
from bigload.runtime.streaming.run_log import ForwardStats
from bigload.units import counted

_CACHE_ARGUMENTS = ("past_key_values", "cache")
"""Of forwards and `generate`: transformers 5.24 renames the first."""


class Sampling(NamedTuple):
    """Choice of tokens; where a field is `None`, as `generation_config.json` beside the weights says.

    A `temperature` of 0 takes the most likely token; `top_p` is the probability of the tokens that are chosen from;
    random numbers begin with `seed`, or with another one each time.
    """

    temperature: float | None = None
    top_p: float | None = None
    seed: int | None = None

    def apply(self, config: Any) -> None:  # noqa: ANN401 - a class of transformers
        """Put what was asked for into a generation config."""
        if self.temperature == 0:
            config.do_sample, config.temperature, config.top_p, config.top_k = False, None, None, None
            return
        if self.temperature is not None:
            config.do_sample, config.temperature = True, self.temperature
        if self.top_p is not None:
            config.do_sample, config.top_p = True, self.top_p


class TextGenerator:
    """Answers prompts with one dispatched model, one after another.

    Args:
        planned: What the model was made of.
        model: The model.
        sampling: How tokens are chosen.
        decode: Turns tokens into text; without it, answers have none, and end at their length only.
        keeps_cache: Whether the KV cache of an answer serves the next prompt, as far as that begins with the same
            tokens and transformers can crop the cache. Encoder-decoders, and models such as Mamba that keep no keys and
            values, read each prompt as a whole.
        measures: Whether answers come with the statistics of their forwards.

    Attributes:
        seed: Of the random numbers, `None` where the most likely token is taken.
    """

    def __init__(
        self,
        planned: PlannedModel,
        model: nn.Module,
        *,
        sampling: Sampling,
        decode: Callable[[list[int]], str] | None = None,
        keeps_cache: bool = False,
        measures: bool = False,
    ) -> None:
        self._planned = planned
        self._model: Any = model
        self._decode = decode
        taken = inspect.signature(planned.maker.model_class.forward).parameters
        self._cache_argument = next((name for name in _CACHE_ARGUMENTS if name in taken), "")
        is_cache_kept = keeps_cache and self._cache_argument and not planned.maker.config.is_encoder_decoder
        self._keeps_cache = bool(is_cache_kept)
        self._measures = measures
        self._cached: tuple[Any, list[int]] | None = None
        """The cache of the last answer, and the tokens that it holds."""
        self._config = planned.generation_config()
        self._config.num_beams, self._config.num_return_sequences = 1, 1  # of others, transformers streams nothing
        self._config.cache_implementation, self._config.return_dict_in_generate = None, False
        if decode is None:
            self._config.eos_token_id = None
        if planned.maker.config.is_encoder_decoder:
            self._config.decoder_start_token_id = self._start_of_decoder(is_text=decode is not None)
            of_transformers: Any = model
            encoder = of_transformers.get_encoder()
            if not hasattr(encoder, "_hf_hook"):  # else transformers attaches accelerate's, which may not be installed
                add_hook_to_module(encoder, AlignDevicesHook(io_same_device=True))
        sampling.apply(self._config)
        self.seed: int | None = None
        if self._config.do_sample:
            self.seed = torch.seed() % 2**32 if sampling.seed is None else sampling.seed
            torch.manual_seed(self.seed)
        # Its own config, not an argument: from the model's, transformers fills in what an argument leaves out.
        self._model.generation_config = self._config

    def answer(
        self,
        tokens: list[int],
        *,
        max_new_tokens: int,
        on_text: Callable[[str], object] = lambda _text: None,
        is_stopped: Callable[[], bool] = lambda: False,
        label: object = None,
    ) -> Answer:
        """Return the answer to the prompt `tokens`; `on_text` gets its text, whole characters at a time, as they come.

        The answer ends after `max_new_tokens` at the latest, when `on_text` raises, or when `is_stopped`, which is
        asked after each token, is true. `label` goes into the answer.
        """
        config = self._config
        config.max_new_tokens, config.max_length = max_new_tokens, None
        config.min_new_tokens = max_new_tokens if self._decode is None else config.min_new_tokens
        config.prefill_chunk_size = PREFILL_CHUNK if len(tokens) > PREFILL_CHUNK else None
        ids = torch.tensor([tokens], device=self._planned.device)
        cache, cached_tokens = self._cache_for(tokens)
        given = {} if cache is None else {self._cache_argument: cache}
        stream = _TokenStream(self._decode, on_text, is_stopped)
        with self._measured(len(tokens), stream) as forwards, suppress(_StoppedAnswer):
            self._model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), streamer=stream, **given)
        stream.flush()
        if cache is not None:
            self._cached = cache, [*tokens, *stream.tokens[:-1]]
        finish = Finish.END if self._is_end(stream.tokens) else Finish.LENGTH
        return Answer(
            prompt_tokens=len(tokens),
            cached_tokens=cached_tokens,
            tokens=tuple(stream.tokens),
            text=stream.text,
            finish=Finish.STOPPED if stream.is_stopped else finish,
            seconds=stream.seconds[-1],
            first_token_seconds=stream.seconds[0],
            forwards=forwards(),
            label=label,
        )

    def forward(self, num_tokens: int) -> Answer:
        """Run a model that generates nothing once, with random tokens."""
        inputs = self._planned.inputs(num_tokens)
        stream = _TokenStream(None, lambda _text: None, lambda: False)
        with self._measured(num_tokens, stream) as forwards, torch.no_grad():
            self._model(**inputs)
            synchronize(self._planned.device)
            seconds = stream.now
        return Answer(
            prompt_tokens=num_tokens,
            tokens=(),
            text="",
            finish=Finish.END,
            seconds=seconds,
            first_token_seconds=None,
            forwards=forwards(),
        )

    def _start_of_decoder(self, *, is_text: bool) -> int:
        """Return the token that a decoder begins with; random tokens may begin with any."""
        starts = self._config.decoder_start_token_id, self._config.bos_token_id
        found = next((token for token in starts if token is not None), None)
        if found is None and is_text:
            raise OptionError(
                f"{self._planned.checkpoint.path} does not say what its decoder begins with",
                hint="set decoder_start_token_id in generation_config.json, or in config.json",
            )
        return found or 0

    def _is_end(self, tokens: list[int]) -> bool:
        """Return whether the last token is one that ends an answer."""
        ends = self._config.eos_token_id
        return bool(tokens) and tokens[-1] in (ends if isinstance(ends, list) else [ends])

    def _cache_for(self, tokens: list[int]) -> tuple[Any, int]:
        """Return the KV cache to go on with, and how many of `tokens` it holds already; the kept one is used up."""
        if not self._keeps_cache:
            return None, 0
        kept, self._cached = self._cached, None
        if kept is not None:
            cache, held = kept
            num_equal = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(held, tokens[:-1], strict=False)))
            is_exact = cache.get_seq_length() == len(held)
            if is_exact and num_equal == len(held):
                return cache, num_equal
            if is_exact and num_equal and cache.is_croppable:
                cache.crop(num_equal - len(held))
                return cache, num_equal
        transformers = import_module("transformers")
        fresh = transformers.DynamicCache(config=self._planned.maker.config.get_text_config(decoder=True))
        try:
            fresh.get_seq_length()
        except ValueError:  # it has states and no positions, as Mamba's, whose argument has that name too in 5.24
            self._keeps_cache = False
            return None, 0
        return fresh, 0

    @contextmanager
    def _measured(self, prompt_tokens: int, stream: _TokenStream) -> Iterator[Callable[[], _Forwards]]:
        """Yield what returns the statistics of forwards in the block; name a lack of memory in it."""
        before = stats_of(self._model) if self._measures else None

        def forwards() -> _Forwards:
            now = None if before is None else stats_of(self._model)
            if before is None or now is None:
                return None
            num_forwards = now.num_forwards - before.num_forwards
            return now.forwards[-num_forwards:] if num_forwards else ()

        try:
            yield forwards
        except (MemoryError, RuntimeError) as error:
            if not is_refusal(error):
                raise
            done = counted(len(stream.tokens), "token")
            raise NotEnoughMemoryError(
                f"the answer, after a prompt of {counted(prompt_tokens, 'token')} and {done},",
                needed_bytes=0,
                available_bytes=available_memory() or 0,
                hint="give weights less memory with -m, or ask for a shorter --context",
            ) from error


_Forwards = tuple[ForwardStats, ...] | None


class _StoppedAnswer(Exception):  # noqa: N818 - no error
    """The user wants no more of this answer."""


class _TokenStream:
    """Receiver of the tokens of transformers' `generate`: first those of the prompt, then one at a time."""

    def __init__(
        self,
        decode: Callable[[list[int]], str] | None,
        on_text: Callable[[str], object],
        is_stopped: Callable[[], bool],
    ) -> None:
        self.tokens: list[int] = []
        self.seconds: list[float] = []
        self.is_stopped = False
        self._pieces = None if decode is None else TextPieces(decode)
        self._on_text = on_text
        self._asks = is_stopped
        self._has_prompt = False
        self._began = time.perf_counter()

    @property
    def now(self) -> float:
        """Seconds since the beginning."""
        return time.perf_counter() - self._began

    @property
    def text(self) -> str:
        """The text so far."""
        return "" if self._pieces is None else self._pieces.text

    def put(self, value: torch.Tensor) -> None:
        """Take tokens on the CPU."""
        if not self._has_prompt:
            self._has_prompt = True
            return
        self.tokens += value.flatten().tolist()
        self.seconds.append(self.now)
        if self._pieces is not None and (piece := self._pieces.add(self.tokens[-1])):
            self._on_text(piece)
        if self._asks():
            self.is_stopped = True
            raise _StoppedAnswer

    def end(self) -> None:
        """Take note of the end, as transformers has it."""

    def flush(self) -> None:
        """Hand over what is left of the text."""
        if self._pieces is not None and (left := self._pieces.end()):
            self._on_text(left)
