"""Models of transformers built from a checkpoint folder, dispatched by a plan; their token inputs and settings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from bigload.checkpoint.byte_source import scheme_of
from bigload.checkpoint.model import Checkpoint
from bigload.errors import OptionError
from bigload.extras import require
from bigload.loading.settings import Method, settings
from bigload.loading.strategy.io_method import MOSTLY_CACHED
from bigload.loading.tensors.views import torch_dtype
from bigload.machine.files.page_cache import cached_fraction
from bigload.planning.plan import Plan
from bigload.planning.plan_file import open_planned, read_plan
from bigload.runtime.device_map.blocks import OFFLOADED, DeviceMap, device_name, device_of, main_device_of
from bigload.runtime.dispatch.load_and_dispatch import load_and_dispatch, load_checkpoint_and_dispatch
from bigload.runtime.modules.init_empty_weights import init_empty_weights
from bigload.runtime.modules.quantised_layers import prepare_quantised
from bigload.runtime.streaming.run_log import RunStats

_ALL_ON_DISK: DeviceMap = {"": "disk"}
_SEED = 0


class ModelMaker(NamedTuple):
    """Factory of models of one class and one config, with all parameters on the meta device.

    The class is the first of the config's `architectures` that transformers has. The dtype of parameters is the
    config's, else that of most bytes of the checkpoint.
    """

    model_class: Any
    config: Any
    dtype: torch.dtype

    @classmethod
    def of(cls, checkpoint: Checkpoint, *, asked_by: str) -> ModelMaker:
        """Return the factory for `checkpoint`. Code in the checkpoint's folder is never executed."""
        require("transformers", asked_by=asked_by, extra="run")
        if not scheme_of(checkpoint.root).is_local:
            hint = f"copy it first: bigload fetch {checkpoint.path}"
            raise OptionError(f"{asked_by} does not run remote checkpoints, found {checkpoint.path}", hint=hint)
        if not (checkpoint.root / "config.json").is_file():
            raise OptionError(
                f"{checkpoint.path} has no config.json",
                hint=f"{asked_by} needs a model folder: config.json beside the weights",
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
            raise OptionError(
                f"transformers {transformers.__version__} cannot read {checkpoint.root / 'config.json'}: {reason[0]}"
            ) from error
        names = config.architectures or []
        model_class = next((getattr(transformers, name) for name in names if hasattr(transformers, name)), None)
        if model_class is None:
            named = ", ".join(names) or "no architectures"
            raise OptionError(
                f"transformers {transformers.__version__} has no class for {checkpoint.path}",
                hint=f"its config.json names {named}",
            )
        if model_class.main_input_name != "input_ids":
            raise OptionError(
                f"{model_class.__name__} takes {model_class.main_input_name}; {asked_by} gives tokens",
                hint="bigload.load_and_dispatch places it by a plan in a program that prepares images or sound",
            )
        return cls(model_class=model_class, config=config, dtype=_dtype(config, checkpoint))

    def check_generates(self) -> None:
        """Raise OptionError for a model, such as an encoder, that answers no text."""
        if not self.generates:
            raise OptionError(
                f"{self.model_class.__name__} generates no text",
                hint="a model for causal language modelling does; --random-tokens 128 times this one",
            )

    @property
    def vocabulary(self) -> int | None:
        """The number of tokens that the model takes; `None` where its config has none."""
        return getattr(self.config.get_text_config(), "vocab_size", None)

    @property
    def placeholders(self) -> dict[int, str]:
        """The tokens in whose places the model puts what is no text, and what that is."""
        names = {kind: (f"{kind}_token_id", f"{kind}_token_index") for kind in ("image", "video", "audio")}
        found = {getattr(self.config, name, None): kind for kind, both in names.items() for name in both}
        return {token: kind for token, kind in found.items() if isinstance(token, int)}

    @property
    def generates(self) -> bool:
        """Whether a model of this class has a `generate` of transformers."""
        return bool(self.model_class.can_generate())

    def empty(self, *, keeps_cache: bool, is_offloaded: bool = False) -> nn.Module:
        """Return a model without values; with `keeps_cache` its outputs carry the KV cache.

        `is_offloaded` says that some of its weights will be brought for each forward.
        """
        self.config.use_cache = keeps_cache
        usual = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            with init_empty_weights(include_buffers=False), _NoDraws():
                model: nn.Module = self.model_class(self.config)
        finally:
            torch.set_default_dtype(usual)
        prepare_quantised(model, is_offloaded=is_offloaded)
        model.tie_weights()  # type: ignore[operator]  # parameters were replaced one by one
        return model.eval()


class PlannedModel(NamedTuple):
    """A model of transformers, its checkpoint, and the plan that places it; `None` for everything on disk.

    `keeps_cache` says whether outputs carry the KV cache; the sizes are those of `dispatch_model`.
    """

    checkpoint: Checkpoint
    plan: Plan | None
    maker: ModelMaker
    keeps_cache: bool = False
    prefetch_bytes: int | None = None
    resident_bytes: int | None = None

    @classmethod
    def open(
        cls,
        checkpoint: Checkpoint | str | Path,
        plan: Plan | str | Path | None,
        *,
        asked_by: str,
        keeps_cache: bool = False,
        prefetch_bytes: int | None = None,
        resident_bytes: int | None = None,
    ) -> PlannedModel:
        """Open the checkpoint and check the plan against it."""
        planned = read_plan(Path(plan)) if isinstance(plan, str | Path) else plan
        opened = open_planned(planned, checkpoint, source=str(plan) if isinstance(plan, str | Path) else "the plan")
        return cls(
            checkpoint=opened,
            plan=None if planned is None else replace(planned, checkpoint_path=str(opened.root)),
            maker=ModelMaker.of(opened, asked_by=asked_by),
            keeps_cache=keeps_cache,
            prefetch_bytes=prefetch_bytes,
            resident_bytes=resident_bytes,
        )

    @property
    def device_map(self) -> DeviceMap:
        """Devices by checkpoint names of modules."""
        return _ALL_ON_DISK if self.plan is None else replace(self.plan, renamed=None).device_map

    @property
    def device(self) -> torch.device:
        """The device that runs modules placed on disk."""
        return torch.device(main_device_of(self.device_map))

    @property
    def load_dtype(self) -> torch.dtype | None:
        """The dtype the plan casts parameters to; `None` where they keep that of the empty model."""
        wanted = None if self.plan is None else self.plan.options.workload.load_dtype
        return None if wanted is None else torch_dtype(wanted)

    @property
    def on_disk(self) -> tuple[str, ...]:
        """Names of the tensors that the plan leaves on disk."""
        placed = self.device_map
        names = (name for name in self.checkpoint.tensors if self.plan is None or not self.plan.leaves_out(name))
        return tuple(name for name in names if device_of(name, placed) == "disk")

    def empty(self) -> nn.Module:
        """Return the model without values."""
        main = device_name(main_device_of(self.device_map))
        is_offloaded = not {*OFFLOADED}.isdisjoint({*map(device_name, self.device_map.values())} - {main})
        return self.maker.empty(keeps_cache=self.keeps_cache, is_offloaded=is_offloaded)

    def dispatched(self, empty: nn.Module | None = None, *, is_brief: bool = False) -> nn.Module:
        """Return the model dispatched by bigload, its streamed weights read from the checkpoint.

        It is `empty`, which `empty()` made, or a new one. If it `is_brief`, it answers once: copies of cached weights
        would not pay.
        """
        prefetch, resident = self.prefetch_bytes, self.resident_bytes
        model = self.empty() if empty is None else empty
        if self.plan is not None:
            return load_and_dispatch(
                model,
                self.plan,
                method=self._method(is_brief=is_brief),
                prefetch_bytes=prefetch,
                resident_bytes=resident,
            )
        return load_checkpoint_and_dispatch(
            model,
            str(self.checkpoint.root),
            _ALL_ON_DISK,
            strict=True,
            prefetch_bytes=prefetch,
            resident_bytes=resident,
        )

    def _method(self, *, is_brief: bool) -> Method | None:
        """Return the I/O method: where the model answers once, cached weights for the CPU stay pages of their files.

        Copies cost the first touch of as much memory, 0.1 to 2.7 s a GiB in virtual machines. They are in huge pages,
        with which a token takes 0.9 to 0.97 of the time: that pays after hundreds of tokens.
        """
        chosen = settings().method
        if not is_brief or self.device.type != "cpu" or chosen is not Method.AUTO:
            return chosen
        cached = cached_fraction(self.checkpoint.root / shard.file for shard in self.checkpoint.shards)
        return Method.MMAP if cached is not None and cached >= MOSTLY_CACHED else chosen

    def generation_config(self) -> Any:  # noqa: ANN401 - a class of transformers
        """Return the settings of `generate` that are beside the weights, or those that the config implies."""
        kind = import_module("transformers").GenerationConfig
        file = self.checkpoint.root / "generation_config.json"
        if not file.is_file():
            return kind.from_model_config(self.maker.config)
        try:
            return kind.from_pretrained(self.checkpoint.root, local_files_only=True)
        except (ValueError, TypeError, OSError) as error:
            raise OptionError(f"transformers cannot read {file}: {error}") from error

    def random_tokens(self, count: int) -> list[int]:
        """Return random tokens, the same ones in every call."""
        ids: list[int] = self.inputs(count)["input_ids"][0].tolist()
        return ids

    def inputs(self, tokens: int) -> dict[str, torch.Tensor]:
        """Return random tokens of shape [1, tokens], the same ones in every call."""
        generator = torch.Generator().manual_seed(_SEED)
        ids = torch.randint(0, self.maker.vocabulary or 1, (1, tokens), generator=generator).to(self.device)
        return {"input_ids": ids, **({"decoder_input_ids": ids} if self.maker.config.is_encoder_decoder else {})}


class _NoDraws(TorchFunctionMode):
    """Mode in which parameters without values are drawn none: torch imports its compiler and sympy to draw them."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: object,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:  # noqa: ANN401 - whatever the function returns
        given = kwargs or {}
        if getattr(func, "__name__", "").endswith("normal_"):
            tensor = args[0] if args else given["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **given)


def synchronize(device: torch.device) -> None:
    """Wait until everything queued on `device` has been computed."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def stats_of(model: nn.Module) -> RunStats | None:
    """Return the statistics of a dispatched model; `None` where no weights stream."""
    stats = getattr(model, "bigload_stats", None)
    return None if stats is None else stats()


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
