"""Queue of the modules and tensors of a model that still need a device, for first-fit planning.

An item is taken from the front, put back, or replaced by its pieces where it stands. Each of these costs about the same
in a model of a hundred names and in one of a hundred thousand.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping

import torch
from torch import nn

from bigload.runtime.device_map.module_sizes import Size
from bigload.runtime.modules.module_names import prefixes

ModuleOrTensor = nn.Module | torch.Tensor | None
"""Module or tensor of a name; `None` for the state that a module saves beside its tensors."""

NO_LAYER = -1


class QueuedModule:
    """A name on the list. `layer_bytes` is the largest layer in it, `NO_LAYER` for most tensors."""

    __slots__ = ("after", "before", "held", "layer_bytes", "name", "num_bytes", "taken_in")

    def __init__(self, name: str, held: ModuleOrTensor, num_bytes: Size, layer_bytes: Size) -> None:
        self.name = name
        self.held = held
        self.num_bytes = num_bytes
        self.layer_bytes = layer_bytes
        self.taken_in = NO_LAYER
        self.before = self.after = self


def direct_parts(module: nn.Module) -> Iterator[tuple[str, ModuleOrTensor]]:
    """Yield what `module` consists of, by its last name: its own parameters, its children, then its own buffers.

    Together they cover its state dict: parameters and children that stand there under two names come twice.
    """
    yield from ((key, parameter) for key, parameter in module._parameters.items() if parameter is not None)
    seen = set()
    for key, child in module._modules.items():
        if child is not None and (id(child) not in seen or _has_tensors(child)):
            yield key, child
        seen.add(id(child))
    yield from ((key, buffer) for key, buffer in module._buffers.items() if buffer is not None)
    if type(module).get_extra_state is not nn.Module.get_extra_state:
        yield "_extra_state", None


def _has_tensors(module: nn.Module) -> bool:
    return next(module.parameters(), None) is not None or next(module.buffers(), None) is not None


class ModuleQueue:
    """Items in the order in which devices are sought for them, and the largest layer among them."""

    def __init__(
        self, named: Iterable[tuple[str, ModuleOrTensor]], sizes: Mapping[str, Size], no_split: Container[str]
    ) -> None:
        self._sizes = sizes
        self._no_split = no_split
        self._layer_bytes: dict[str, Size] = {}
        self._items: dict[str, QueuedModule] = {}
        self._ends = QueuedModule("", None, 0, NO_LAYER)
        for name, held in named:
            self._insert(self._item(name, held), self._ends)
        self._layers = _LargestLayer(self)

    @property
    def largest_layer(self) -> Size:
        """Bytes that a device keeps free for offloaded layers, see `_LargestLayer`."""
        return self._layers.num_bytes

    @property
    def first(self) -> QueuedModule | None:
        return self._ends.after if self._items else None

    def __iter__(self) -> Iterator[QueuedModule]:
        item = self.first
        while item is not None:
            yield item
            item = self.following(item)

    def following(self, item: QueuedModule) -> QueuedModule | None:
        return item.after if item.after is not self._ends else None

    def copy(self) -> ModuleQueue:
        return ModuleQueue([(item.name, item.held) for item in self], self._sizes, self._no_split)

    def take_first(self) -> QueuedModule | None:
        item = self.first
        if item is not None:
            self.remove(item)
            self._layers.take(item)
        return item

    def put_first(self, item: QueuedModule) -> None:
        self._insert(item, self._ends.after)
        self._layers.add(item)

    def remove(self, item: QueuedModule) -> None:
        del self._items[item.name]
        item.before.after, item.after.before = item.after, item.before
        self._layers.drop(item)

    def can_split(self, item: QueuedModule) -> bool:
        return isinstance(item.held, nn.Module) and not self._is_layer(item.held)

    def split(self, item: QueuedModule, *, recount: bool = True) -> QueuedModule:
        """Replace `item` by its own parameters, children and own buffers, and return the first of them."""
        assert isinstance(item.held, nn.Module), "can_split() is asked first"
        pieces = [self._item(f"{item.name}.{key}", held) for key, held in direct_parts(item.held)]
        following = item.after
        self.remove(item)
        for piece in pieces:
            self._insert(piece, following)
            self._layers.add(piece)
        if recount:
            self._layers.recount()
        else:
            self._layers.replace(item, pieces)
        return pieces[0]

    def bring_forward(self, name: str) -> None:
        """Put the module `name` first, splitting what it lies in; what attains the largest layer is not looked up."""
        for prefix in prefixes(name):
            if prefix != name and prefix in self._items:
                self.split(self._items[prefix], recount=False)
        item = self._items[name]
        self.remove(item)
        self.put_first(item)

    def holder(self, name: str) -> QueuedModule | None:
        """Return the item that is or contains the tensor `name`."""
        return next((self._items[prefix] for prefix in prefixes(name) if prefix in self._items), None)

    def _item(self, name: str, held: ModuleOrTensor) -> QueuedModule:
        layer = self._largest_layer(name, held) if isinstance(held, nn.Module) else NO_LAYER
        return QueuedModule(name, held, self._sizes.get(name, 0), layer)

    def _is_layer(self, module: nn.Module) -> bool:
        return type(module).__name__ in self._no_split or next(module.children(), None) is None

    def _largest_layer(self, name: str, module: nn.Module) -> Size:
        found = self._layer_bytes.get(name)
        if found is None:
            if self._is_layer(module):
                found = self._sizes.get(name, 0)
            else:
                found = max(self._largest_layer(f"{name}.{key}", child) for key, child in module.named_children())
            self._layer_bytes[name] = found
        return found

    def _insert(self, item: QueuedModule, following: QueuedModule) -> None:
        self._items[item.name] = item
        item.before, item.after = following.before, following
        following.before.after = following.before = item


class _LargestLayer:
    """The bytes of the largest layer on a work list, as first-fit planning has always kept it.

    It is looked up anew when the layers that attained it have all been taken from the front, and after a split. So it
    is too large for a while if such a layer went along with one that it is tied to, and never too small. At the very
    start, tensors that belong to the root itself count as layers too.
    """

    def __init__(self, items: Iterable[QueuedModule]) -> None:
        self._epoch = 0
        self._counts: Counter[Size] = Counter()
        self._largest_first: list[Size] = []
        sizes = []
        for item in items:
            if not isinstance(item.held, nn.Module):
                item.layer_bytes = item.num_bytes
            self.add(item)
            sizes.append(item.layer_bytes)
        self.num_bytes: Size = max(sizes, default=0)
        self._num_left = sizes.count(self.num_bytes)

    def add(self, item: QueuedModule) -> None:
        if isinstance(item.held, nn.Module):
            if not self._counts[item.layer_bytes]:
                heapq.heappush(self._largest_first, -item.layer_bytes)
            self._counts[item.layer_bytes] += 1

    def drop(self, item: QueuedModule) -> None:
        if isinstance(item.held, nn.Module):
            self._counts[item.layer_bytes] -= 1

    def take(self, item: QueuedModule) -> None:
        """Note that `item`, which was dropped, came from the front."""
        self._num_left -= self._counts_now(item)
        if not self._num_left:
            self.recount()
        item.taken_in = self._epoch

    def replace(self, item: QueuedModule, pieces: Iterable[QueuedModule]) -> None:
        """Note that what `item` attained is now attained by some of its pieces."""
        self._num_left += sum(self._counts_now(piece) for piece in pieces) - self._counts_now(item)

    def recount(self) -> None:
        self._epoch += 1
        while self._largest_first and not self._counts[-self._largest_first[0]]:
            heapq.heappop(self._largest_first)
        self.num_bytes = -self._largest_first[0] if self._largest_first else 0
        self._num_left = self._counts[self.num_bytes]

    def _counts_now(self, item: QueuedModule) -> bool:
        """Return whether `item` attained the largest layer at the last look, and was not taken since."""
        is_listed = isinstance(item.held, nn.Module) or self._epoch == 0
        return is_listed and item.layer_bytes == self.num_bytes and item.taken_in != self._epoch
