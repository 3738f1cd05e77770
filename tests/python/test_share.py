"""kvzc.share: a tensor moves into memory that peers can map, and stays what it was."""

import contextlib
import gc
import resource
import signal
from typing import Any

import kvzc
import numpy as np
import pytest
import torch
from helpers import Peer, State, mappings, until
from views import TORCH_DTYPES, dtype_name, random_bytes


def is_mapped(engine: kvzc.Engine, tensor: torch.Tensor) -> bool:
    with engine.register(tensor) as region:
        return region.path.startswith("mapped")


def alone(view: torch.Tensor) -> torch.Tensor:
    """The same without the base that a view keeps alive and that would stay behind."""
    return view.detach()


@pytest.mark.parametrize("dtype", TORCH_DTYPES, ids=dtype_name)
def test_every_dtype_moves_bit_by_bit(engine: kvzc.Engine, dtype: torch.dtype) -> None:
    values = torch.from_numpy(random_bytes(1, 48 * dtype.itemsize))
    tensor = alone(values.clone().view(dtype).view(4, 12))
    address = tensor.data_ptr()
    assert kvzc.share(tensor) is tensor
    assert tensor.data_ptr() != address
    assert tensor.dtype == dtype
    assert tensor.shape == (4, 12)
    assert torch.equal(tensor.view(-1).view(torch.uint8), values)
    assert is_mapped(engine, tensor)


@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.arange(24).view(4, 6).t(),
        lambda: torch.arange(24)[5:17:3],
        lambda: torch.arange(24).as_strided((2, 3), (7, 2), 3),
        lambda: torch.arange(24).view(4, 6)[:, 2],
        lambda: torch.tensor(7),
        lambda: torch.arange(3).expand(4, 3),
        lambda: torch.zeros((2, 3, 4, 5)).to(memory_format=torch.channels_last),
    ],
    ids=["transposed", "sliced", "as_strided", "column", "scalar", "expanded", "channels_last"],
)
def test_shape_strides_and_offset_stay(make: Any) -> None:
    tensor = alone(make())
    like = tensor.clone()
    was = tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.untyped_storage().nbytes()
    kvzc.share(tensor)
    assert was == (
        tensor.shape,
        tensor.stride(),
        tensor.storage_offset(),
        tensor.untyped_storage().nbytes(),
    )
    assert torch.equal(tensor, like)


def test_it_becomes_a_target_that_peers_map(engine: kvzc.Engine) -> None:
    tensor = torch.zeros((4, 8))
    assert not is_mapped(engine, tensor)
    kvzc.share(tensor)
    with engine.register(tensor[1:3]) as region:
        assert region.path.startswith("mapped")
        engine.put(torch.ones((2, 8)), region.handle()).wait()
    assert tensor.sum(1).tolist() == [0, 8, 8, 0]


def test_sharing_again_does_nothing() -> None:
    tensor = torch.arange(5)
    address = kvzc.share(tensor).data_ptr()
    view = tensor[2:]
    for again in (tensor, view):  # Views are no obstacle now.
        assert kvzc.share(again) is again
    assert tensor.data_ptr() == address
    made = kvzc.empty(8, torch.float32)
    address = made.data_ptr()
    assert kvzc.share(made).data_ptr() == address


def test_a_parameter_stays_a_parameter_and_learns_on() -> None:
    layer = torch.nn.Linear(4, 3)
    x = torch.ones(2, 4)
    before = layer(x).detach().clone()
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.5)
    for parameter in layer.parameters():
        assert kvzc.share(parameter) is parameter
        assert isinstance(parameter, torch.nn.Parameter)
        assert parameter.requires_grad
        assert parameter.is_leaf
        assert parameter.grad is None
    assert torch.equal(layer(x), before)
    layer(x).sum().backward()
    assert layer.weight.grad is not None
    address = layer.weight.data_ptr()
    optimizer.step()
    assert layer.weight.data_ptr() == address
    assert not torch.equal(layer(x), before)


def test_what_is_no_leaf_keeps_its_history() -> None:
    x = torch.ones(3, requires_grad=True)
    y = x * 2
    kvzc.share(y)
    assert y.requires_grad
    y.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [2.0] * 3


def test_a_storage_that_others_use_is_refused_and_stays(engine: kvzc.Engine) -> None:
    base = torch.arange(8)
    others: list[Any] = [base.view(2, 4), base[3:], base.detach()]
    address = base.data_ptr()
    for i in range(4):
        with pytest.raises(kvzc.InvalidArgument, match="3 other"):
            kvzc.share([base, *others][i])
    assert base.data_ptr() == address
    assert base.tolist() == list(range(8))
    others.clear()
    gc.collect()
    with pytest.raises(kvzc.InvalidArgument, match="1 other"):
        kvzc.share(base[:4])
    kvzc.share(base)
    assert is_mapped(engine, base)


def test_a_tensor_over_numpys_memory_is_moved_out_of_it() -> None:
    array = np.arange(6)
    tensor = kvzc.share(torch.from_numpy(array))
    tensor += 1
    assert array.tolist() == [0, 1, 2, 3, 4, 5]
    assert tensor.tolist() == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("what", "error", "match"),
    [
        (np.zeros(3), kvzc.Unsupported, r"ndarray.*kvzc\.empty"),
        (bytearray(3), kvzc.Unsupported, "bytearray"),
        ([torch.zeros(3)], kvzc.Unsupported, "list"),
        (None, kvzc.Unsupported, "NoneType"),
        (torch.zeros(3, device="meta"), kvzc.Unsupported, "meta"),
        (torch.eye(3).to_sparse(), kvzc.Unsupported, "sparse"),
        (torch.zeros(0), kvzc.InvalidArgument, "without bytes"),
        (torch.zeros((3, 0)), kvzc.InvalidArgument, "without bytes"),
    ],
    ids=lambda value: getattr(value, "__name__", None) or str(type(value).__name__),
)
def test_what_cannot_move_is_refused(what: Any, error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        kvzc.share(what)


def leave_storage(state: State, how: str) -> bool:
    """Registers a tensor, gives it another storage, and moves bytes by the old handle."""
    ones, back = torch.ones(4 << 20), torch.zeros(4 << 20)
    tensor = torch.zeros(4 << 20)  # Large, so that it is unmapped when it is freed.
    with kvzc.Engine(default_timeout=10) as engine, engine.register(tensor) as region:
        if how == "share":
            with contextlib.suppress(kvzc.InvalidArgument):
                kvzc.share(tensor)
        elif how == "data":
            tensor.data = torch.zeros(1)
        else:
            tensor.set_(torch.zeros(1))
        engine.put(ones, region.handle()).wait()
        engine.get(back, region.handle()).wait()
    return torch.equal(ones, back)


@pytest.mark.parametrize("how", ["share", "data", "set_"])
def test_a_tensor_that_leaves_its_storage_leaves_a_region_that_still_has_it(
    peer: Peer, how: str
) -> None:
    """VIEW-07, LIFE-15: what is registered is the storage, so that is what must live."""
    assert peer.call(leave_storage, how)


def test_the_memory_goes_with_the_tensor() -> None:
    before = mappings()
    tensors = [kvzc.share(torch.zeros(1000)) for _ in range(5)]
    assert mappings() == before + 5
    tensors.clear()
    gc.collect()
    until(lambda: mappings() == before)


def share_without_memory(state: State) -> tuple[str, bool]:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    tensor = torch.ones(1 << 20)
    address = tensor.data_ptr()
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, resource.RLIM_INFINITY))  # Of memfds too.
    try:
        kvzc.share(tensor)
    except kvzc.Error as error:
        stays = tensor.data_ptr() == address and tensor.sum().item() == 1 << 20
        return type(error).__name__, stays
    return "", False


def test_a_shortage_is_an_error_and_the_tensor_stays(peer: Peer) -> None:
    assert peer.call(share_without_memory) == ("LimitExceeded", True)
