"""Load a checkpoint right to where its parts run, and dispatch the model; what is on disk stays where it is.

`load_checkpoint_and_dispatch` has the signature of accelerate 1.15; `load_and_dispatch` carries out a plan.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from bigload.checkpoint.model import Checkpoint
from bigload.checkpoint.source import open_checkpoint
from bigload.devices import Device
from bigload.errors import LegacyPickleError, NoOffloadFolderError, PlanOptionError, StateDictMismatchError
from bigload.layouts.device_folders import PLAN_FILE
from bigload.loading.load import load
from bigload.loading.tensors import parsed_dtype, torch_dtype, torch_shape
from bigload.planning.plan import Plan
from bigload.planning.plan_file import check_plan, read_plan
from bigload.runtime.auto_device_map import infer_auto_device_map
from bigload.runtime.blocks import OFFLOADED, DeviceLike, device_of, main_device_of, place_of
from bigload.runtime.device_maps import check_device_map
from bigload.runtime.device_memory import MaxMemoryLike, get_balanced_memory
from bigload.runtime.dispatch import dispatch_loaded
from bigload.runtime.module_tensors import set_module_tensor_to_device
from bigload.runtime.offload_store import OffloadedWeightsLoader
from bigload.runtime.offload_writer import OffloadWriter
from bigload.runtime.stored_weights import StoredWeights
from bigload.runtime.tied_parameters import check_tied_parameters_on_same_device, find_tied_parameters

StrPath = str | os.PathLike[str]

_logger = logging.getLogger(__name__)

_NAMED_MAPS = ("auto", "balanced", "balanced_low_0", "sequential")
