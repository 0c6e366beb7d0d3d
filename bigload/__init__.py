"""Plan, reshard and load checkpoints that are larger than the devices that run them.

    >>> import bigload
    >>> plan = bigload.plan("./llama-70b", {"cuda:0": "22GiB", "cpu": "64GiB"})  # doctest: +SKIP
    >>> print(plan)                                                              # doctest: +SKIP
    >>> tensors = bigload.load("./llama-8b")                                     # doctest: +SKIP

Names are loaded when they are first used, so that `import bigload` is quick and needs no torch. Those that move weights
into memory need it, and raise MissingPackageError without it; opening, planning and resharding do not, but for casts.
"""

from __future__ import annotations

import warnings
from contextlib import suppress
from importlib import import_module

from bigload.version import __version__

_MODULES = {
    "bigload.bench.bench_load": "bench_load",
    "bigload.bench.results.chrome_trace": "run_trace write_trace",
    "bigload.bench.results.report": "BenchReport StrategyResult",
    "bigload.checkpoint.byte_source": "ByteSource",
    "bigload.checkpoint.model": "Checkpoint CheckpointWarning Shard Span TensorInfo",
    "bigload.checkpoint.source": "open_checkpoint",
    "bigload.devices": "Device",
    "bigload.distributed.process_control.barriers": "check_trigger set_trigger wait_for_everyone",
    "bigload.distributed.process_control.main_process_first": "local_main_process_first main_process_first",
    "bigload.distributed.process_control.on_process": (
        "on_last_process on_local_main_process on_local_process on_main_process on_process"
    ),
    "bigload.distributed.process_control.process_index": (
        "is_last_process is_local_main_process is_main_process local_process_index num_processes print process_index"
    ),
    "bigload.distributed.process_control.process_state": "Accelerator PartialState",
    "bigload.distributed.process_control.saving": "save",
    "bigload.distributed.process_control.splitting": "split_between_processes",
    "bigload.distributed.unwrapping": "extract_model_from_parallel",
    "bigload.dtypes": "DType",
    "bigload.errors": (
        "AbsentWeightError AccessDeniedError AdapterError BigloadError CheckpointError CheckpointNotFoundError "
        "DamagedOutputError DeviceMapError DispatchedModelError DoesNotFitError InvalidCheckpointError "
        "InvalidPlanError LayoutError LegacyPickleError LoadError ManifestNotFoundError MissingPackageError "
        "ModelNotSendableError NamesUnknownError NotEnoughMemoryError NotEnoughSpaceError OptionError "
        "OutputExistsError ParallelError PartitionError PlanError PlanNotFoundError Problem ProcessControlError "
        "RankError ReadError StalePlanError StateDictMismatchError UnknownTensorError UnsupportedDTypeError "
        "UnsupportedFormatError UnsupportedMethodError WorkerError WorkerTimeoutError WriteError"
    ),
    "bigload.layouts.differences": "DiffReport TensorDifference diff",
    "bigload.layouts.fetching.fetch": "FetchReport fetch",
    "bigload.layouts.formats.offload_reader": "OffloadFolder",
    "bigload.layouts.kinds.rank_slices": "RanksFolder read_ranks",
    "bigload.layouts.resharding.reshard": "ReshardReport reshard",
    "bigload.layouts.transforms.dequantize": "Dequantize",
    "bigload.layouts.transforms.lora": "MergeLora",
    "bigload.layouts.transforms.quantize": "Quantize",
    "bigload.layouts.transforms.tensor_names": "AddPrefix Drop Only Rename",
    "bigload.layouts.verification.make_manifest": "ManifestReport write_manifest",
    "bigload.layouts.verification.verify": "FileProblem VerifyReport verify",
    "bigload.loading.load": "LoadedTensors load",
    "bigload.loading.progress": "Progress",
    "bigload.loading.report": "LoadReport",
    "bigload.loading.scheduling.slices": "Slice",
    "bigload.loading.settings": "Method",
    "bigload.parallel.parallelize": "parallelize",
    "bigload.parallel.sharded_loading.load_sharded": "LoadedParts RankLoadReport load_parts load_sharded",
    "bigload.parallel.tensor_parallel.apply": "apply_tensor_parallel plan_tensor_parallel",
    "bigload.parallel.tensor_parallel.plan": "LocalArgument TensorParallelPlan",
    "bigload.parallel.workers.parallel_model": "ParallelModel ParallelReport",
    "bigload.parallel.workers.requests": "WorkerReport",
    "bigload.planning.budget.budget": "MemoryBudget",
    "bigload.planning.choices": "Balance Experts NameScheme Order Policy",
    "bigload.planning.model_parallel.parallel_plan": "ParallelPlan RankUse",
    "bigload.planning.model_parallel.parallel_plan_file": "read_parallel_plan write_parallel_plan",
    "bigload.planning.model_parallel.parallel_planner": "plan_ranks",
    "bigload.planning.model_parallel.rank_grid": "RankGrid",
    "bigload.planning.placement.optimality": "Certificate Verdict",
    "bigload.planning.plan": "DeviceUse Plan PlanNote",
    "bigload.planning.plan_file": "read_plan write_plan",
    "bigload.planning.planner": "plan",
    "bigload.planning.tensor_parallel.division": "Division",
    "bigload.runtime.accelerate_helpers": (
        "clear_device_cache find_executable_batch_size get_module_class_from_name patch_environment release_memory "
        "skip_first_batches"
    ),
    "bigload.runtime.device_map.auto_device_map": "infer_auto_device_map",
    "bigload.runtime.device_map.checks": "check_device_map clean_device_map",
    "bigload.runtime.device_map.device_memory": "get_balanced_memory get_max_memory",
    "bigload.runtime.device_map.first_fit": "fallback_allocate",
    "bigload.runtime.device_map.model_units": "units_of_model",
    "bigload.runtime.device_map.module_sizes": (
        "CustomDtype calculate_maximum_sizes compute_module_sizes compute_module_total_buffer_size "
        "convert_file_size_to_int dtype_byte_size get_max_layer_size get_module_leaves get_non_persistent_buffers "
        "id_tensor_storage named_module_tensors"
    ),
    "bigload.runtime.device_map.tied_parameters": (
        "check_tied_parameters_in_config check_tied_parameters_on_same_device find_tied_parameters "
        "get_module_size_with_ties"
    ),
    "bigload.runtime.dispatch.dispatch": "cpu_offload cpu_offload_with_hook disk_offload dispatch_model",
    "bigload.runtime.dispatch.dispatch_context": "dispatch",
    "bigload.runtime.dispatch.load_and_dispatch": "load_and_dispatch load_checkpoint_and_dispatch",
    "bigload.runtime.dispatch.load_checkpoint": "load_checkpoint_in_model load_state_dict",
    "bigload.runtime.hooks.align_devices": "AlignDevicesHook",
    "bigload.runtime.hooks.attach_hooks": (
        "attach_align_device_hook attach_align_device_hook_on_blocks attach_execution_device_hook"
    ),
    "bigload.runtime.hooks.cpu_offload_hooks": "CpuOffload UserCpuOffloadHook",
    "bigload.runtime.hooks.hooks": (
        "ModelHook SequentialHook add_hook_to_module remove_hook_from_module remove_hook_from_submodules"
    ),
    "bigload.runtime.hooks.layerwise_casting": "LayerwiseCastingHook attach_layerwise_casting_hooks",
    "bigload.runtime.hooks.send_to_device": "find_device send_to_device",
    "bigload.runtime.modules.init_empty_weights": "init_empty_weights init_on_device",
    "bigload.runtime.modules.module_tensors": (
        "align_module_device check_device_same has_offloaded_params retie_parameters set_module_tensor_to_device"
    ),
    "bigload.runtime.modules.quantised_layers": "prepare_quantised",
    "bigload.runtime.offload.offload_functions": (
        "extract_submodules_state_dict load_offloaded_weight offload_state_dict offload_weight save_offload_index"
    ),
    "bigload.runtime.offload.offloaded_state": (
        "get_state_dict_from_offload get_state_dict_offloaded_model load_offloaded_weights"
    ),
    "bigload.runtime.offload.offloaded_weights_loader": "OffloadedWeightsLoader",
    "bigload.runtime.offload.stored_weights": "StoredWeights",
    "bigload.runtime.offload.weight_sources": "PrefixedDataset",
}

# torch warns of a missing numpy whenever it is imported; bigload never asks torch for numpy's arrays.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)

_MODULE_OF = {name: module for module, names in _MODULES.items() for name in names.split()}

# `from bigload import *` is not to change what a program prints with.
__all__ = ["__version__", *(name for name in _MODULE_OF if name != "print")]  # noqa: PLE0604 - every item is text


def __getattr__(name: str) -> object:
    if name == "transformers":  # the one module that is used by its name
        return import_module("bigload.transformers")
    module = _MODULE_OF.get(name)
    if name in ("bench_run", "run_forwards"):  # public names of 0.1
        raise AttributeError(f"no bigload.{name} any more: use `bigload run --stats`, or model.bigload_stats()")
    if module is None and name.endswith("Error"):  # perhaps a former name, of which that module warns
        with suppress(AttributeError):
            return getattr(import_module("bigload.errors"), name)
    if module is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    try:
        found = getattr(import_module(module), name)
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        from bigload.errors import MissingPackageError

        raise MissingPackageError(f"bigload.{name}", "torch", extra="torch") from None
    globals()[name] = found
    return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_MODULE_OF})
