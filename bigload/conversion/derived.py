"""Conversion of a checkpoint by the table of classes or by transformers, whichever knows more."""

from __future__ import annotations

import sys

from bigload.checkpoint.model import Checkpoint
from bigload.conversion.conversion import Conversion, as_stored
from bigload.errors import NamesUnknownError
from bigload.extras import installed_version, release_of


def derived_conversion(checkpoint: Checkpoint) -> Conversion:
    """Return what the tensors in memory are made of, by the table of classes, which needs no torch, or by transformers.

    Transformers itself is asked in a program that has imported it, which may have registered conversions of its own;
    where it is of another release than the table; and about classes that the table does not know.
    """
    # Imported here: a reshard that keeps the names needs neither the table nor what it is read with.
    from bigload.conversion.without_transformers.checkpoint_conversion import conversion_of_checkpoint
    from bigload.conversion.without_transformers.model_classes import other_transformers

    if "transformers" not in sys.modules and other_transformers() is None:
        try:
            return conversion_of_checkpoint(checkpoint)
        except NamesUnknownError as error:
            if not has_transformers_5():
                hint = "leave the names as they are; or install transformers, which may know more"
                raise NamesUnknownError(error.message, hint=hint) from None
    elif not has_transformers_5():
        return conversion_of_checkpoint(checkpoint)
    from bigload.conversion.with_transformers.checkpoints import conversion_by_transformers

    return conversion_by_transformers(checkpoint)


def renamed_by_transformers(checkpoint: Checkpoint) -> dict[str, str]:
    """Return the stored names of tensors that transformers' models only rename, by their names there.

    Nothing where the conversion is not known.
    """
    try:
        conversion = derived_conversion(checkpoint)
    except NamesUnknownError:
        return {}
    stored = {name: as_stored(tensor) for name, tensor in checkpoint.tensors.items()}
    sources = ((name, tensor, tensor.sources[0]) for name, tensor in conversion.tensors.items() if tensor.sources)
    return {name: source for name, tensor, source in sources if source in stored and tensor == stored[source]}


def has_transformers_5() -> bool:
    """Return whether transformers 5 or later is installed; it is not imported."""
    return release_of(installed_version("transformers") or "") >= (5,)
