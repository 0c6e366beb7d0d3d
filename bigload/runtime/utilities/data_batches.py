"""Data loaders that begin later, to resume in the middle of an epoch.

Name and signature are those of `accelerate.data_loader` 1.15.
"""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Any

from torch.utils.data import BatchSampler, DataLoader, IterableDataset

_KEPT = (
    *("num_workers", "collate_fn", "pin_memory", "timeout", "worker_init_fn", "multiprocessing_context"),
    *("generator", "prefetch_factor", "persistent_workers", "pin_memory_device"),
)


def skip_first_batches(dataloader: DataLoader[Any], num_batches: int = 0) -> DataLoader[Any]:
    """Return a data loader that gives what `dataloader` does, without the first `num_batches`.

    Samples of those are not loaded, unless the data set can only be iterated.
    """
    options: dict[str, Any] = {name: getattr(dataloader, name) for name in _KEPT}
    dataset = dataloader.dataset
    if isinstance(dataset, IterableDataset):
        options.update(batch_size=dataloader.batch_size, drop_last=dataloader.drop_last)
        return _LaterLoader(num_batches, dataset, **options)
    is_in_sampler = isinstance(dataloader.sampler, BatchSampler)
    batches: Any = dataloader.sampler if is_in_sampler else dataloader.batch_sampler
    return DataLoader(dataset, batch_sampler=_LaterBatches(batches, num_batches), **options)


class _LaterBatches(BatchSampler):
    def __init__(self, batches: BatchSampler, num_skipped: int) -> None:
        self.batches = batches
        self.num_skipped = num_skipped

    def __iter__(self) -> Iterator[list[int]]:
        return islice(self.batches, self.num_skipped, None)

    def __len__(self) -> int:
        return len(self.batches) - self.num_skipped


class _LaterLoader(DataLoader[Any]):
    def __init__(self, num_skipped: int, dataset: Any, **options: Any) -> None:  # noqa: ANN401 - DataLoader's
        super().__init__(dataset, **options)
        self.num_skipped = num_skipped

    def __iter__(self) -> Any:  # noqa: ANN401 - an iterator of whatever the data set gives
        return islice(super().__iter__(), self.num_skipped, None)

    def __len__(self) -> int:
        return super().__len__() - self.num_skipped
