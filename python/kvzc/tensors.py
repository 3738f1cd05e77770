"""Moving tensors into memory that every local transport can map."""

from __future__ import annotations

from typing import TYPE_CHECKING

from . import _core

if TYPE_CHECKING:
    import torch


def share(tensor: torch.Tensor) -> torch.Tensor:
    """Move a torch CPU tensor's storage into memory like that of :func:`empty`, in place.

    ``tensor`` keeps its values, shape, strides and identity, parameters included; its address
    changes, so raw pointers and NumPy arrays taken before go stale. Peers then copy straight into
    and out of it. Does nothing when it lies there already. Returns ``tensor``.

    Raises ``InvalidArgument`` for a tensor without bytes, or whose storage other tensors use too
    (they would stay behind: share the one that they are views of before making them);
    ``Unsupported`` for what is not a strided CPU tensor; ``LimitExceeded`` with the remedy.
    """
    import torch  # noqa: PLC0415: kvzc does not need torch

    if not isinstance(tensor, torch.Tensor):
        raise _core.Unsupported(
            f"share() moves torch tensors in place, and {type(tensor).__name__} cannot be moved; "
            "allocate with kvzc.empty(shape, dtype) and copy"
        )
    if tensor.device.type != "cpu" or tensor.layout != torch.strided:
        raise _core.Unsupported(
            f"share() moves strided CPU tensors, not {tensor.layout} on {tensor.device}"
        )
    old = tensor.untyped_storage()
    if old.nbytes() == 0:
        raise _core.InvalidArgument("a tensor without bytes has no memory to share")
    if _core._is_sharable(old.data_ptr(), old.nbytes()):
        return tensor
    # The tensor and `old` itself are two.
    users = torch._C._storage_Use_Count(old._cdata)
    if users > 2:
        raise _core.InvalidArgument(
            f"{users - 2} other tensors or storages use this tensor's storage and would stay "
            "behind; share the tensor before making views of it"
        )
    moved = _core.empty(old.nbytes(), torch.uint8).untyped_storage()
    moved.copy_(old)
    with torch.no_grad():
        tensor.set_(moved, tensor.storage_offset(), tensor.shape, tensor.stride())
    return tensor
