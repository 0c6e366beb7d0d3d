"""Plan, reshard and load checkpoints that are larger than the devices that run them.

    >>> import bigload
    >>> plan = bigload.plan("./llama-70b", {"cuda:0": "22GiB", "cpu": "64GiB"})  # doctest: +SKIP
    >>> print(plan)                                                              # doctest: +SKIP
    >>> tensors = bigload.load("./llama-8b")                                     # doctest: +SKIP

Names are loaded when they are first used, so that `import bigload` is quick and needs no torch. Those that move weights
into memory need it; opening, planning and resharding never do.
"""

from __future__ import annotations

import warnings
from importlib import import_module
from typing import TYPE_CHECKING

from bigload.version import __version__ as __version__

if TYPE_CHECKING:  # `as` marks them as public to type checkers
    from bigload.bench.bench_load import bench_load as bench_load
    from bigload.bench.bench_run import bench_run as bench_run
    from bigload.bench.report import BenchReport as BenchReport
    from bigload.bench.report import StrategyResult as StrategyResult
    from bigload.bench.run_report import RunReport as RunReport
    from bigload.bench.run_report import RunResult as RunResult
    from bigload.bench.run_stats import RunStatsReport as RunStatsReport
    from bigload.bench.run_stats import run_forwards as run_forwards
    from bigload.bench.run_trace import run_trace as run_trace
    from bigload.bench.run_trace import write_trace as write_trace
    from bigload.checkpoint.model import Checkpoint as Checkpoint
    from bigload.checkpoint.model import CheckpointWarning as CheckpointWarning
    from bigload.checkpoint.model import Shard as Shard
    from bigload.checkpoint.model import Span as Span
    from bigload.checkpoint.model import TensorInfo as TensorInfo
    from bigload.checkpoint.source import open_checkpoint as open_checkpoint
    from bigload.devices import Device as Device
    from bigload.distributed.barriers import check_trigger as check_trigger
    from bigload.distributed.barriers import set_trigger as set_trigger
    from bigload.distributed.barriers import wait_for_everyone as wait_for_everyone
    from bigload.distributed.main_process_first import local_main_process_first as local_main_process_first
    from bigload.distributed.main_process_first import main_process_first as main_process_first
    from bigload.distributed.on_process import on_last_process as on_last_process
    from bigload.distributed.on_process import on_local_main_process as on_local_main_process
    from bigload.distributed.on_process import on_local_process as on_local_process
    from bigload.distributed.on_process import on_main_process as on_main_process
    from bigload.distributed.on_process import on_process as on_process
    from bigload.distributed.process_index import is_last_process as is_last_process
    from bigload.distributed.process_index import is_local_main_process as is_local_main_process
    from bigload.distributed.process_index import is_main_process as is_main_process
    from bigload.distributed.process_index import local_process_index as local_process_index
    from bigload.distributed.process_index import num_processes as num_processes
    from bigload.distributed.process_index import print as print  # noqa: A004
    from bigload.distributed.process_index import process_index as process_index
    from bigload.distributed.process_state import Accelerator as Accelerator
    from bigload.distributed.process_state import PartialState as PartialState
    from bigload.distributed.saving import save as save
    from bigload.distributed.splitting import split_between_processes as split_between_processes
    from bigload.dtypes import DType as DType
    from bigload.errors import AbsentWeightError as AbsentWeightError
    from bigload.errors import AlreadyDispatchedError as AlreadyDispatchedError
    from bigload.errors import BenchOptionError as BenchOptionError
    from bigload.errors import BigloadError as BigloadError
    from bigload.errors import BudgetError as BudgetError
    from bigload.errors import ChangedShapeError as ChangedShapeError
    from bigload.errors import CheckpointError as CheckpointError
    from bigload.errors import CheckpointNotFoundError as CheckpointNotFoundError
    from bigload.errors import CompiledModuleError as CompiledModuleError
    from bigload.errors import DamagedOutputError as DamagedOutputError
    from bigload.errors import DeviceNotPresentError as DeviceNotPresentError
    from bigload.errors import DispatchedModelError as DispatchedModelError
    from bigload.errors import DoesNotFitError as DoesNotFitError
    from bigload.errors import IncompleteDeviceMapError as IncompleteDeviceMapError
    from bigload.errors import InvalidCheckpointError as InvalidCheckpointError
    from bigload.errors import InvalidManifestError as InvalidManifestError
    from bigload.errors import InvalidPlanError as InvalidPlanError
    from bigload.errors import LayoutError as LayoutError
    from bigload.errors import LegacyPickleError as LegacyPickleError
    from bigload.errors import LoadError as LoadError
    from bigload.errors import LoadOptionError as LoadOptionError
    from bigload.errors import MainProcessFailedError as MainProcessFailedError
    from bigload.errors import ManifestNotFoundError as ManifestNotFoundError
    from bigload.errors import MetaTensorError as MetaTensorError
    from bigload.errors import MissingPackageError as MissingPackageError
    from bigload.errors import MissingWeightsError as MissingWeightsError
    from bigload.errors import ModelNotSendableError as ModelNotSendableError
    from bigload.errors import NamesUnknownError as NamesUnknownError
    from bigload.errors import NoOffloadFolderError as NoOffloadFolderError
    from bigload.errors import NotEnoughMemoryError as NotEnoughMemoryError
    from bigload.errors import NotEnoughSpaceError as NotEnoughSpaceError
    from bigload.errors import NotOffloadableError as NotOffloadableError
    from bigload.errors import OffloadedEditError as OffloadedEditError
    from bigload.errors import OffloadedTrainingError as OffloadedTrainingError
    from bigload.errors import OtherWeightsError as OtherWeightsError
    from bigload.errors import OutputExistsError as OutputExistsError
    from bigload.errors import ParallelCopyError as ParallelCopyError
    from bigload.errors import ParallelError as ParallelError
    from bigload.errors import ParallelOptionError as ParallelOptionError
    from bigload.errors import PartitionError as PartitionError
    from bigload.errors import PlanError as PlanError
    from bigload.errors import PlanNotFoundError as PlanNotFoundError
    from bigload.errors import PlanOptionError as PlanOptionError
    from bigload.errors import Problem as Problem
    from bigload.errors import ProcessControlError as ProcessControlError
    from bigload.errors import ProcessOptionError as ProcessOptionError
    from bigload.errors import QuantisedParameterError as QuantisedParameterError
    from bigload.errors import RankError as RankError
    from bigload.errors import ReadError as ReadError
    from bigload.errors import ReshardOptionError as ReshardOptionError
    from bigload.errors import StalePlanError as StalePlanError
    from bigload.errors import StateDictMismatchError as StateDictMismatchError
    from bigload.errors import UnknownTensorError as UnknownTensorError
    from bigload.errors import UnsupportedDTypeError as UnsupportedDTypeError
    from bigload.errors import UnsupportedFormatError as UnsupportedFormatError
    from bigload.errors import UnsupportedMethodError as UnsupportedMethodError
    from bigload.errors import VerificationError as VerificationError
    from bigload.errors import WorkerDiedError as WorkerDiedError
    from bigload.errors import WorkerError as WorkerError
    from bigload.errors import WorkersDisagreeError as WorkersDisagreeError
    from bigload.errors import WorkersEndedError as WorkersEndedError
    from bigload.errors import WorkerTimeoutError as WorkerTimeoutError
    from bigload.errors import WriteError as WriteError
    from bigload.layouts.kinds.rank_slices import RanksFolder as RanksFolder
    from bigload.layouts.kinds.rank_slices import read_ranks as read_ranks
    from bigload.layouts.offload_reader import OffloadFolder as OffloadFolder
    from bigload.layouts.reshard import ReshardReport as ReshardReport
    from bigload.layouts.reshard import reshard as reshard
    from bigload.layouts.verification.verify import FileProblem as FileProblem
    from bigload.layouts.verification.verify import VerifyReport as VerifyReport
    from bigload.layouts.verification.verify import verify as verify
    from bigload.loading.load import LoadedTensors as LoadedTensors
    from bigload.loading.load import load as load
    from bigload.loading.methods import Method as Method
    from bigload.loading.progress import Progress as Progress
    from bigload.loading.readers.byte_source import ByteSource as ByteSource
    from bigload.loading.report import LoadReport as LoadReport
    from bigload.loading.slices import Slice as Slice
    from bigload.parallel.sharded_loading.load_sharded import LoadedParts as LoadedParts
    from bigload.parallel.sharded_loading.load_sharded import load_parts as load_parts
    from bigload.parallel.sharded_loading.load_sharded import load_sharded as load_sharded
    from bigload.parallel.sharded_loading.report import RankLoadReport as RankLoadReport
    from bigload.parallel.tensor_parallel.apply import apply_tensor_parallel as apply_tensor_parallel
    from bigload.parallel.tensor_parallel.apply import plan_tensor_parallel as plan_tensor_parallel
    from bigload.parallel.tensor_parallel.plan import LocalArgument as LocalArgument
    from bigload.parallel.tensor_parallel.plan import TensorParallelPlan as TensorParallelPlan
    from bigload.parallel.workers.parallel_model import ParallelModel as ParallelModel
    from bigload.parallel.workers.parallel_model import ParallelReport as ParallelReport
    from bigload.parallel.workers.parallelize import parallelize as parallelize
    from bigload.parallel.workers.requests import WorkerReport as WorkerReport
    from bigload.planning.budget.budget import MemoryBudget as MemoryBudget
    from bigload.planning.choices import Balance as Balance
    from bigload.planning.choices import Experts as Experts
    from bigload.planning.choices import NameScheme as NameScheme
    from bigload.planning.choices import Order as Order
    from bigload.planning.choices import Policy as Policy
    from bigload.planning.placement.optimality import Certificate as Certificate
    from bigload.planning.placement.optimality import Verdict as Verdict
    from bigload.planning.plan import DeviceUse as DeviceUse
    from bigload.planning.plan import Plan as Plan
    from bigload.planning.plan import PlanNote as PlanNote
    from bigload.planning.plan_file import read_plan as read_plan
    from bigload.planning.plan_file import write_plan as write_plan
    from bigload.planning.planner import plan as plan
    from bigload.planning.tensor_parallel.partition import Division as Division
    from bigload.runtime.device_map.auto_device_map import infer_auto_device_map as infer_auto_device_map
    from bigload.runtime.device_map.checks import check_device_map as check_device_map
    from bigload.runtime.device_map.checks import clean_device_map as clean_device_map
    from bigload.runtime.device_map.device_memory import get_balanced_memory as get_balanced_memory
    from bigload.runtime.device_map.device_memory import get_max_memory as get_max_memory
    from bigload.runtime.device_map.first_fit_fallback import fallback_allocate as fallback_allocate
    from bigload.runtime.device_map.model_units import units_of_model as units_of_model
    from bigload.runtime.device_map.module_sizes import CustomDtype as CustomDtype
    from bigload.runtime.device_map.module_sizes import calculate_maximum_sizes as calculate_maximum_sizes
    from bigload.runtime.device_map.module_sizes import compute_module_sizes as compute_module_sizes
    from bigload.runtime.device_map.module_sizes import (
        compute_module_total_buffer_size as compute_module_total_buffer_size,
    )
    from bigload.runtime.device_map.module_sizes import convert_file_size_to_int as convert_file_size_to_int
    from bigload.runtime.device_map.module_sizes import dtype_byte_size as dtype_byte_size
    from bigload.runtime.device_map.module_sizes import get_max_layer_size as get_max_layer_size
    from bigload.runtime.device_map.module_sizes import get_module_leaves as get_module_leaves
    from bigload.runtime.device_map.module_sizes import get_non_persistent_buffers as get_non_persistent_buffers
    from bigload.runtime.device_map.module_sizes import id_tensor_storage as id_tensor_storage
    from bigload.runtime.device_map.module_sizes import named_module_tensors as named_module_tensors
    from bigload.runtime.device_map.tied_parameters import (
        check_tied_parameters_in_config as check_tied_parameters_in_config,
    )
    from bigload.runtime.device_map.tied_parameters import (
        check_tied_parameters_on_same_device as check_tied_parameters_on_same_device,
    )
    from bigload.runtime.device_map.tied_parameters import find_tied_parameters as find_tied_parameters
    from bigload.runtime.device_map.tied_parameters import get_module_size_with_ties as get_module_size_with_ties
    from bigload.runtime.dispatch.dispatch import cpu_offload as cpu_offload
    from bigload.runtime.dispatch.dispatch import cpu_offload_with_hook as cpu_offload_with_hook
    from bigload.runtime.dispatch.dispatch import disk_offload as disk_offload
    from bigload.runtime.dispatch.dispatch import dispatch_model as dispatch_model
    from bigload.runtime.dispatch.dispatch_context import dispatch as dispatch
    from bigload.runtime.dispatch.load_and_dispatch import load_and_dispatch as load_and_dispatch
    from bigload.runtime.dispatch.load_and_dispatch import load_checkpoint_and_dispatch as load_checkpoint_and_dispatch
    from bigload.runtime.dispatch.load_checkpoint import load_checkpoint_in_model as load_checkpoint_in_model
    from bigload.runtime.dispatch.load_checkpoint import load_state_dict as load_state_dict
    from bigload.runtime.hooks.align_devices import AlignDevicesHook as AlignDevicesHook
    from bigload.runtime.hooks.align_devices import attach_align_device_hook as attach_align_device_hook
    from bigload.runtime.hooks.align_devices import (
        attach_align_device_hook_on_blocks as attach_align_device_hook_on_blocks,
    )
    from bigload.runtime.hooks.align_devices import attach_execution_device_hook as attach_execution_device_hook
    from bigload.runtime.hooks.cpu_offload_hooks import CpuOffload as CpuOffload
    from bigload.runtime.hooks.cpu_offload_hooks import UserCpuOffloadHook as UserCpuOffloadHook
    from bigload.runtime.hooks.hooks import ModelHook as ModelHook
    from bigload.runtime.hooks.hooks import SequentialHook as SequentialHook
    from bigload.runtime.hooks.hooks import add_hook_to_module as add_hook_to_module
    from bigload.runtime.hooks.hooks import remove_hook_from_module as remove_hook_from_module
    from bigload.runtime.hooks.hooks import remove_hook_from_submodules as remove_hook_from_submodules
    from bigload.runtime.hooks.layerwise_casting import LayerwiseCastingHook as LayerwiseCastingHook
    from bigload.runtime.hooks.layerwise_casting import attach_layerwise_casting_hooks as attach_layerwise_casting_hooks
    from bigload.runtime.hooks.send_to_device import find_device as find_device
    from bigload.runtime.hooks.send_to_device import send_to_device as send_to_device
    from bigload.runtime.init_empty_weights import init_empty_weights as init_empty_weights
    from bigload.runtime.init_empty_weights import init_on_device as init_on_device
    from bigload.runtime.modules.module_tensors import align_module_device as align_module_device
    from bigload.runtime.modules.module_tensors import check_device_same as check_device_same
    from bigload.runtime.modules.module_tensors import has_offloaded_params as has_offloaded_params
    from bigload.runtime.modules.module_tensors import retie_parameters as retie_parameters
    from bigload.runtime.modules.module_tensors import set_module_tensor_to_device as set_module_tensor_to_device
    from bigload.runtime.offload.offload_store import OffloadedWeightsLoader as OffloadedWeightsLoader
    from bigload.runtime.offload.offload_store import PrefixedDataset as PrefixedDataset
    from bigload.runtime.offload.offload_store import extract_submodules_state_dict as extract_submodules_state_dict
    from bigload.runtime.offload.offload_store import load_offloaded_weight as load_offloaded_weight
    from bigload.runtime.offload.offload_store import offload_state_dict as offload_state_dict
    from bigload.runtime.offload.offload_store import offload_weight as offload_weight
    from bigload.runtime.offload.offload_store import save_offload_index as save_offload_index
    from bigload.runtime.offload.offloaded_state import get_state_dict_from_offload as get_state_dict_from_offload
    from bigload.runtime.offload.offloaded_state import get_state_dict_offloaded_model as get_state_dict_offloaded_model
    from bigload.runtime.offload.offloaded_state import load_offloaded_weights as load_offloaded_weights
    from bigload.runtime.offload.stored_weights import StoredWeights as StoredWeights
    from bigload.runtime.utilities.data_batches import skip_first_batches as skip_first_batches
    from bigload.runtime.utilities.device_cache import clear_device_cache as clear_device_cache
    from bigload.runtime.utilities.device_cache import find_executable_batch_size as find_executable_batch_size
    from bigload.runtime.utilities.device_cache import release_memory as release_memory
    from bigload.runtime.utilities.environment import patch_environment as patch_environment
    from bigload.runtime.utilities.unwrapping import extract_model_from_parallel as extract_model_from_parallel
    from bigload.runtime.utilities.unwrapping import get_module_class_from_name as get_module_class_from_name


_HOMES = {
    "bigload.bench.bench_load": ("bench_load",),
    "bigload.bench.bench_run": ("bench_run",),
    "bigload.bench.report": ("BenchReport", "StrategyResult"),
    "bigload.bench.run_report": ("RunReport", "RunResult"),
    "bigload.bench.run_stats": ("RunStatsReport", "run_forwards"),
    "bigload.bench.run_trace": ("run_trace", "write_trace"),
    "bigload.checkpoint.model": ("Checkpoint", "CheckpointWarning", "Shard", "Span", "TensorInfo"),
    "bigload.checkpoint.source": ("open_checkpoint",),
    "bigload.devices": ("Device",),
    "bigload.distributed.barriers": ("check_trigger", "set_trigger", "wait_for_everyone"),
    "bigload.distributed.main_process_first": ("local_main_process_first", "main_process_first"),
    "bigload.distributed.on_process": (
        "on_last_process",
        "on_local_main_process",
        "on_local_process",
        "on_main_process",
        "on_process",
    ),
    "bigload.distributed.process_index": (
        "is_last_process",
        "is_local_main_process",
        "is_main_process",
        "local_process_index",
        "num_processes",
        "print",
        "process_index",
    ),
    "bigload.distributed.process_state": ("Accelerator", "PartialState"),
    "bigload.distributed.saving": ("save",),
    "bigload.distributed.splitting": ("split_between_processes",),
    "bigload.dtypes": ("DType",),
    "bigload.errors": (
        "AbsentWeightError",
        "AlreadyDispatchedError",
        "BenchOptionError",
        "BigloadError",
        "BudgetError",
        "ChangedShapeError",
        "CheckpointError",
        "CheckpointNotFoundError",
        "CompiledModuleError",
        "DamagedOutputError",
        "DeviceNotPresentError",
        "DispatchedModelError",
        "DoesNotFitError",
        "IncompleteDeviceMapError",
        "InvalidCheckpointError",
        "InvalidManifestError",
        "InvalidPlanError",
        "LayoutError",
        "LegacyPickleError",
        "LoadError",
        "LoadOptionError",
        "MainProcessFailedError",
        "ManifestNotFoundError",
        "MetaTensorError",
        "MissingPackageError",
        "MissingWeightsError",
        "ModelNotSendableError",
        "NamesUnknownError",
        "NoOffloadFolderError",
        "NotEnoughMemoryError",
        "NotEnoughSpaceError",
        "NotOffloadableError",
        "OffloadedEditError",
        "OffloadedTrainingError",
        "OtherWeightsError",
        "OutputExistsError",
        "ParallelCopyError",
        "ParallelError",
        "ParallelOptionError",
        "PartitionError",
        "PlanError",
        "PlanNotFoundError",
        "PlanOptionError",
        "Problem",
        "ProcessControlError",
        "ProcessOptionError",
        "QuantisedParameterError",
        "RankError",
        "ReadError",
        "ReshardOptionError",
        "StalePlanError",
        "StateDictMismatchError",
        "UnknownTensorError",
        "UnsupportedDTypeError",
        "UnsupportedFormatError",
        "UnsupportedMethodError",
        "VerificationError",
        "WorkerDiedError",
        "WorkerError",
        "WorkerTimeoutError",
        "WorkersDisagreeError",
        "WorkersEndedError",
        "WriteError",
    ),
    "bigload.layouts.kinds.rank_slices": ("RanksFolder", "read_ranks"),
    "bigload.layouts.offload_reader": ("OffloadFolder",),
    "bigload.layouts.reshard": ("ReshardReport", "reshard"),
    "bigload.layouts.verification.verify": ("FileProblem", "VerifyReport", "verify"),
    "bigload.loading.load": ("LoadedTensors", "load"),
    "bigload.loading.methods": ("Method",),
    "bigload.loading.progress": ("Progress",),
    "bigload.loading.readers.byte_source": ("ByteSource",),
    "bigload.loading.report": ("LoadReport",),
    "bigload.loading.slices": ("Slice",),
    "bigload.parallel.sharded_loading.load_sharded": ("LoadedParts", "load_parts", "load_sharded"),
    "bigload.parallel.sharded_loading.report": ("RankLoadReport",),
    "bigload.parallel.tensor_parallel.apply": ("apply_tensor_parallel", "plan_tensor_parallel"),
    "bigload.parallel.tensor_parallel.plan": ("LocalArgument", "TensorParallelPlan"),
    "bigload.parallel.workers.parallel_model": ("ParallelModel", "ParallelReport"),
    "bigload.parallel.workers.parallelize": ("parallelize",),
    "bigload.parallel.workers.requests": ("WorkerReport",),
    "bigload.planning.budget.budget": ("MemoryBudget",),
    "bigload.planning.choices": ("Balance", "Experts", "NameScheme", "Order", "Policy"),
    "bigload.planning.placement.optimality": ("Certificate", "Verdict"),
    "bigload.planning.plan": ("DeviceUse", "Plan", "PlanNote"),
    "bigload.planning.plan_file": ("read_plan", "write_plan"),
    "bigload.planning.planner": ("plan",),
    "bigload.planning.tensor_parallel.partition": ("Division",),
    "bigload.runtime.device_map.auto_device_map": ("infer_auto_device_map",),
    "bigload.runtime.device_map.checks": ("check_device_map", "clean_device_map"),
    "bigload.runtime.device_map.device_memory": ("get_balanced_memory", "get_max_memory"),
    "bigload.runtime.device_map.first_fit_fallback": ("fallback_allocate",),
    "bigload.runtime.device_map.model_units": ("units_of_model",),
    "bigload.runtime.device_map.module_sizes": (
        "CustomDtype",
        "calculate_maximum_sizes",
        "compute_module_sizes",
        "compute_module_total_buffer_size",
        "convert_file_size_to_int",
        "dtype_byte_size",
        "get_max_layer_size",
        "get_module_leaves",
        "get_non_persistent_buffers",
        "id_tensor_storage",
        "named_module_tensors",
    ),
    "bigload.runtime.device_map.tied_parameters": (
        "check_tied_parameters_in_config",
        "check_tied_parameters_on_same_device",
        "find_tied_parameters",
        "get_module_size_with_ties",
    ),
    "bigload.runtime.dispatch.dispatch": ("cpu_offload", "cpu_offload_with_hook", "disk_offload", "dispatch_model"),
    "bigload.runtime.dispatch.dispatch_context": ("dispatch",),
    "bigload.runtime.dispatch.load_and_dispatch": ("load_and_dispatch", "load_checkpoint_and_dispatch"),
    "bigload.runtime.dispatch.load_checkpoint": ("load_checkpoint_in_model", "load_state_dict"),
    "bigload.runtime.hooks.align_devices": (
        "AlignDevicesHook",
        "attach_align_device_hook",
        "attach_align_device_hook_on_blocks",
        "attach_execution_device_hook",
    ),
    "bigload.runtime.hooks.cpu_offload_hooks": ("CpuOffload", "UserCpuOffloadHook"),
    "bigload.runtime.hooks.hooks": (
        "ModelHook",
        "SequentialHook",
        "add_hook_to_module",
        "remove_hook_from_module",
        "remove_hook_from_submodules",
    ),
    "bigload.runtime.hooks.layerwise_casting": ("LayerwiseCastingHook", "attach_layerwise_casting_hooks"),
    "bigload.runtime.hooks.send_to_device": ("find_device", "send_to_device"),
    "bigload.runtime.init_empty_weights": ("init_empty_weights", "init_on_device"),
    "bigload.runtime.modules.module_tensors": (
        "align_module_device",
        "check_device_same",
        "has_offloaded_params",
        "retie_parameters",
        "set_module_tensor_to_device",
    ),
    "bigload.runtime.offload.offload_store": (
        "OffloadedWeightsLoader",
        "PrefixedDataset",
        "extract_submodules_state_dict",
        "load_offloaded_weight",
        "offload_state_dict",
        "offload_weight",
        "save_offload_index",
    ),
    "bigload.runtime.offload.offloaded_state": (
        "get_state_dict_from_offload",
        "get_state_dict_offloaded_model",
        "load_offloaded_weights",
    ),
    "bigload.runtime.offload.stored_weights": ("StoredWeights",),
    "bigload.runtime.utilities.data_batches": ("skip_first_batches",),
    "bigload.runtime.utilities.device_cache": ("clear_device_cache", "find_executable_batch_size", "release_memory"),
    "bigload.runtime.utilities.environment": ("patch_environment",),
    "bigload.runtime.utilities.unwrapping": ("extract_model_from_parallel", "get_module_class_from_name"),
}

# torch warns of a missing numpy whenever it is imported; bigload never asks torch for numpy's arrays.
warnings.filterwarnings("ignore", message="Failed to initialize NumPy", category=UserWarning)

_HOME_OF = {name: home for home, names in _HOMES.items() for name in names}

# `from bigload import *` is not to change what a program prints with.
__all__ = ["__version__", *(name for name in _HOME_OF if name != "print")]  # noqa: PLE0604 - every item is text


if not TYPE_CHECKING:  # a type checker that saw it would believe in any name

    def __getattr__(name: str) -> object:
        home = _HOME_OF.get(name)
        if home is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        found = getattr(import_module(home), name)
        globals()[name] = found
        return found


def __dir__() -> list[str]:
    return sorted({*__all__, *_HOME_OF})
