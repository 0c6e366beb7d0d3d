"""The model of transformers that a folder describes, without its weights, and what it is given to compute."""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any

import torch
from torch import nn

from bigload.checkpoint.model import Checkpoint
from bigload.errors import BenchOptionError, MissingPackageError
from bigload.loading.tensors import torch_dtype
from bigload.runtime.init_empty_weights import init_empty_weights

_SEED = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelMaker:
    """Makes models of one class and one config, with all parameters on the meta device.

    Attributes:
        model_class: The first of the config's `architectures` that is there, a class of transformers.
        config: What transformers made of `config.json`.
        dtype: What parameters are; what the config says, else what most of the checkpoint is.
    """

    model_class: Any
    config: Any
    dtype: torch.dtype

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, asked_by: str) -> ModelMaker:
        """Return what makes the model of `checkpoint`. No code of the checkpoint's own is run.

        Raises:
            MissingPackageError: transformers is not installed; the text names `asked_by`.
            BenchOptionError: there is no config, or it names no class that takes tokens.
        """
        if find_spec("transformers") is None:
            raise MissingPackageError(asked_by, "transformers", extra="run")
        if not (checkpoint.root / "config.json").is_file():
            raise BenchOptionError(
                f"{checkpoint.path} has no config.json",
                hint=f"{asked_by} needs the folder of a model: its config beside its weights",
            )
        transformers = import_module("transformers")
        transformers.logging.set_verbosity_error()
        transformers.logging.disable_progress_bar()
        try:
            config = transformers.AutoConfig.from_pretrained(
                checkpoint.root, local_files_only=True, trust_remote_code=False
            )
        except (ValueError, KeyError, OSError) as error:
            reason = str(error).strip().splitlines() or [type(error).__name__]
            raise BenchOptionError(
                f"transformers {transformers.__version__} cannot read {checkpoint.root / 'config.json'}: {reason[0]}"
            ) from error
        names = config.architectures or []
        model_class = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
        if model_class is None:
            named = ", ".join(names) or "no architectures"
            raise BenchOptionError(
                f"transformers {transformers.__version__} has no class for {checkpoint.path}",
                hint=f"its config.json names {named}",
            )
        if model_class.main_input_name != "input_ids":
            raise BenchOptionError(
                f"{model_class.__name__} takes {model_class.main_input_name}; {asked_by} gives tokens"
            )
        return cls(model_class=model_class, config=config, dtype=_dtype(config, checkpoint))

    def empty(self, *, keeps_cache: bool) -> nn.Module:
        """Return a model without values. With `keeps_cache` its answers carry the KV cache."""
        self.config.use_cache = keeps_cache
        usual = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with init_empty_weights(include_buffers=False):
                model: nn.Module = self.model_class(self.config)
        finally:
            torch.set_default_dtype(usual)
        model.tie_weights()  # type: ignore[operator]  # parameters were replaced one by one
        return model.eval()


@dataclass(frozen=True, slots=True, kw_only=True)
class Work:
    """What is timed: one forward of `tokens`, or a greedy decoding of `new_tokens` after them, with the KV cache."""

    tokens: int = 1
    new_tokens: int = 0

    @property
    def num_forwards(self) -> int:
        """How often the model runs."""
        return max(self.new_tokens, 1)

    def inputs(self, maker: ModelMaker, device: torch.device) -> dict[str, torch.Tensor]:
        """Return tokens of shape [1, tokens], the same ones each time."""
        vocabulary = maker.config.get_text_config().vocab_size
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(0, vocabulary, (1, self.tokens), generator=generator).to(device)
        return {"input_ids": ids, **({"decoder_input_ids": ids} if maker.config.is_encoder_decoder else {})}

    def run(self, model: nn.Module, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        """Return the answer of the last forward: logits, or what the model gives first. All of it has been computed.

        Raises:
            BenchOptionError: the model keeps no cache by which `new_tokens` could be decoded.
        """
        with torch.no_grad():
            answer = model(**inputs)
            for _ in range(self.new_tokens - 1):
                cache = getattr(answer, "past_key_values", None)
                if cache is None or "decoder_input_ids" in inputs:
                    raise BenchOptionError(f"{type(model).__name__} cannot be asked for new tokens one by one")
                chosen = answer.logits[:, -1:].argmax(-1).to(inputs["input_ids"].device)
                answer = model(input_ids=chosen, past_key_values=cache)
        found: torch.Tensor = answer.logits if hasattr(answer, "logits") else answer[0]
        if found.device.type == "cuda":
            torch.cuda.synchronize(found.device)
        return found


def _dtype(config: Any, checkpoint: Checkpoint) -> torch.dtype:  # noqa: ANN401 - a class of transformers
    said = getattr(config, "dtype", None)
    if isinstance(said, torch.dtype):
        return said
    sizes: dict[torch.dtype, int] = {}
    for tensor in checkpoint.tensors.values():
        dtype = torch_dtype(tensor.dtype)
        if dtype in (torch.float32, torch.float16, torch.bfloat16, torch.float64):
            sizes[dtype] = sizes.get(dtype, 0) + tensor.num_bytes
    return max(sizes, key=lambda dtype: sizes[dtype], default=torch.get_default_dtype())
