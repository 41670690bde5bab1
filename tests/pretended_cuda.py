"""A GPU that is not there: all of the project runs as on `cuda:0`, by the arithmetic of the CPU.

    with pretended_cuda() as gpu:
        train(replace(config, device="cuda"))
    print(gpu.seen("wait"), gpu.seen("h2d"))

A tensor is on the device if its storage is marked so; views, parameters and gradients share it. A
storage gets its mark from a factory function with device=cuda, from a copy to the device, or as the
result of an operation on marked tensors. Two modes of torch do that: Above is where Python calls
torch and asks for `x.device`, Gpu is where torch calls its kernels, in the backward pass, too.

What it catches, with the project's line that did it:

- tensors of both devices in one operation;
- waits of the host for the device: item, tolist, nonzero, a mask as an index, copies that block;
- copies between host and device. One to pinned memory that does not block leaves garbage there
  until the host waits, and one from pinned memory must not see it change before that;
- a CUDA graph that cannot be captured, or depends on what was so at its capture. Here it is the
  list of its operations: the capture changes nothing, a replay runs them on the same memory.

What it cannot see: waits inside a kernel of CUDA, in a package that is not torch, in another thread
or process; streams that race; memory; rounding. Autocast is that of the CPU, to the same dtype.
"""

import math
import sys
import weakref
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from unittest.mock import patch

import torch
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

ROOT = Path(__file__).parent.parent
CUDA = torch.device("cuda", 0)
aten, T = torch.ops.aten, torch.Tensor

# Kernels after which the host knows a value, or a size that depends on values.
WAITING = {aten._local_scalar_dense, aten.equal, aten.nonzero, aten.masked_select, aten.bincount}
WAITING |= {aten._unique2, aten.unique_dim}
INDEXING = {aten.index, aten._unsafe_index, aten.index_put, aten.index_put_}
# Here, and in what goes element by element, a tensor of the CPU without dimensions is a number.
NUMBERS = {aten.fill, aten.fill_, aten.masked_fill, aten.masked_fill_}
BOTH_DEVICES = {aten.copy_, aten._has_compatible_shallow_copy_type}


class Misplaced(BaseException):
    """What a GPU would have refused, or done wrong. No `except Exception` hides it."""


def here():
    """File, line and function of the project that are running."""
    frame = sys._getframe()
    while frame:
        file, code = Path(frame.f_code.co_filename), frame.f_code
        if file.is_relative_to(ROOT) and ".venv" not in file.parts and file != Path(__file__):
            return str(file.relative_to(ROOT)), frame.f_lineno, code.co_qualname
        frame = frame.f_back
    return "outside of the project", 0, ""


def refuse(message):
    raise Misplaced("{}:{} in {}: ".format(*here()) + message)


def place(x):
    """Where a tensor is: 'cuda', 'pinned' (memory of the host) or 'cpu'."""
    return getattr(x.untyped_storage(), "place", "cpu")


def on_cuda(x):
    return place(x) == "cuda"


def put(x, where):
    """Mark the storage of a tensor. -> x"""
    x.untyped_storage().place = where
    return x


def names_cuda(device):
    return device is not None and torch.device(device).type == "cuda"


def tensors_of(*found):
    """The tensors in nested lists, tuples and dicts."""
    return [x for x in tree_leaves(found) if isinstance(x, T)]


@torch.inference_mode()
def spoil(x):
    """Leave in memory what nobody can take for a result."""
    x.fill_(torch.nan if x.is_floating_point() else 1 if x.dtype == torch.bool else 10**9)


class Gpu(TorchDispatchMode):
    """The pretended device, where torch calls its kernels: what happened, and what is under way."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()  # of (wait, h2d or d2h; file, function, what)
        self.graph = None  # the one that is being captured
        self.default = "cpu"  # where a kernel without tensors makes one: in what torch calls now
        self.pools = {}  # the graphs of each pool of memory
        self.under_way, self.copies = [], 0  # copies that do not block; how many there were

    def seen(self, kind):
        """{(file, function, what): how often there was a 'wait' of the host, or a copy to the
        device, 'h2d', or back, 'd2h'}."""
        return Counter({key[1:]: n for key, n in self.counts.items() if key[0] == kind})

    def note(self, what, way=None, waits=True, until=math.inf):
        """Something happens: a copy, or a wait for the copies up to number `until`."""
        if self.graph:
            return waits and refuse(f"{what} waits for the device while a graph is captured")
        file, _, function = here()
        for kind in [way] * (way is not None) + ["wait"] * waits:
            self.counts[kind, file, function, what] += 1
        if waits:
            self.finish(until)

    @torch.inference_mode()
    def finish(self, until):
        """The copies up to number `until` are done."""
        done = [copy for copy in self.under_way if copy.number <= until]
        self.under_way = self.under_way[len(done) :]
        for copy in done:
            if copy.arrives:
                copy.host.copy_(copy.content)
            elif not torch.equal(copy.host, copy.content):
                refuse(f"pinned {tuple(copy.host.shape)} has changed before its copy was awaited")

    @contextmanager
    def making(self, tensors, cuda=False):
        """What torch makes within it without any tensor is where these are."""
        before = self.default
        self.default = "cuda" if cuda or any(map(on_cuda, tensors)) else "cpu"
        try:
            yield
        finally:
            self.default = before

    def copied(self, source, target, blocks):
        """Note the copy of a tensor into another, if it goes from device to device."""
        arrives = on_cuda(source)
        if arrives == on_cuda(target):
            return
        host = target if arrives else source
        blocks = blocks or place(host) != "pinned"  # then CUDA may wait, too
        self.note("copy", "d2h" if arrives else "h2d", blocks)
        if not (blocks or self.graph):
            self.copies += 1
            copy = dict(number=self.copies, host=host, content=host.clone(), arrives=arrives)
            self.under_way.append(SimpleNamespace(**copy))
            if arrives:
                spoil(host)

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunction():
            with self:  # in inference mode an operation made of others comes as a whole
                found = func.decompose(*args, **kwargs)
            return self.run(func, args, kwargs) if found is NotImplemented else found

    def run(self, func, args, kwargs):
        """One operation of torch."""
        kernel, tensors = func.overloadpacket, tensors_of(args, kwargs)
        on = any(map(on_cuda, tensors))
        if on and kernel not in BOTH_DEVICES:
            self.check(func, args, kwargs, tensors)
        found = self.graph.record(func, args, kwargs) if self.graph else func(*args, **kwargs)
        if kernel is aten.copy_:
            self.copied(args[1], args[0], not (args[2:] or kwargs.get("non_blocking")))
        elif on or (not tensors and self.default == "cuda"):
            for x in tensors_of(found):
                put(x, "cuda")
        return found

    def check(self, func, args, kwargs, tensors):
        """Refuse tensors of both devices, and note a wait."""
        kernel = func.overloadpacket
        if kernel in INDEXING:
            indices, value = tensors_of(args[1]), tensors_of(args[2:])
            if not all(map(on_cuda, indices)):
                self.note("index from the CPU", "h2d")
            masked = any(x.dtype == torch.bool for x in indices)
            if masked and not (value and value[0].numel() == 1):  # which is a masked_fill
                self.note("index by a mask")
            tensors = [args[0], *(x for x in value if x.dim())]
        elif kernel in NUMBERS or torch.Tag.pointwise in func.tags:
            tensors = [x for x in tensors if x.dim() or on_cuda(x)]
        if not all(map(on_cuda, tensors)):
            shapes = ", ".join(f"{place(x)} {tuple(x.shape)}" for x in tensors)
            refuse(f"{func} of tensors on different devices: {shapes}")
        if kernel in WAITING:
            item = kernel is aten._local_scalar_dense
            self.note("item" if item else kernel.__name__, "d2h" if item else None)


class Above(TorchFunctionMode):
    """Where Python calls torch."""

    def __init__(self, gpu):
        super().__init__()
        self.gpu = gpu
        self.own = {
            T.device.__get__: lambda x: CUDA if on_cuda(x) else T.device.__get__(x),
            T.is_cuda.__get__: on_cuda,
            T.pin_memory: lambda x: put(x.clone(), "pinned"),
            T.to: self.to,
            T.cpu: lambda x: self.move(x, "cpu"),
            T.tolist: self.tolist,
            T.numpy: self.numpy,
            T.__array__: self.numpy,
            T.__setitem__: self.set_item,
            T.new_tensor: lambda x, data, device=None: self.tensor(
                data, dtype=x.dtype, device=device or (CUDA if on_cuda(x) else None)
            ),
            torch.tensor: self.tensor,
            # With a number of classes CUDA does not look at the values; the CPU does.
            F.one_hot: lambda x, n: put(torch.eye(n, dtype=torch.long), place(x))[x],
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in self.own:
            return self.own[func](*args, **kwargs)
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        cuda = names_cuda(device)
        if cuda:
            kwargs["device"] = "cpu"
        with self.gpu.making(tensors_of(args, kwargs), cuda):
            x = func(*args, **kwargs)
        if pinned or device is not None:  # also zeros_like(x, device="cpu")
            put(x, "pinned" if pinned else "cuda" if cuda else "cpu")
        return x

    def move(self, x, device, dtype=None, blocks=True, copy=False):
        """Tensor.to, for each pair of devices."""
        dtype = dtype or x.dtype
        if device is None or names_cuda(device) == on_cuda(x):
            return T.to(x, dtype, copy=copy)
        y = T.to(x, dtype, copy=True)
        put(y, "cuda" if names_cuda(device) else "cpu" if blocks else "pinned")
        self.gpu.copied(x, y.detach(), blocks)
        return y

    def to(self, x, *args, copy=False, **kwargs):
        if args and isinstance(args[0], T):
            args = CUDA if on_cuda(args[0]) else "cpu", args[0].dtype, *args[1:]
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self.move(x, device, dtype, not non_blocking, copy)

    def tensor(self, data, *, device=None, **kwargs):
        for x in tensors_of(data):
            if on_cuda(x):
                self.gpu.note("item", "d2h")
        return self.move(torch.tensor(data, **kwargs), device)

    def tolist(self, x):
        if on_cuda(x):
            self.gpu.note("tolist", "d2h")
        return T.tolist(x)

    def numpy(self, x, *args, **kwargs):
        if on_cuda(x):
            refuse("a tensor on cuda:0 is no numpy array: use .cpu()")
        return T.numpy(x)

    def set_item(self, x, index, value):
        if on_cuda(x) and not isinstance(value, T):  # for CUDA the number is made on the device
            value = put(torch.tensor(value, dtype=x.dtype), "cuda")
        T.__setitem__(x, index, value)


class Graph:
    """torch.cuda.CUDAGraph: operations on tensors that stay where they are."""

    gpu = None

    def __init__(self):
        self.operations, self.id = [], None
        self.made, self.saved = {}, {}  # storages by their ids: of results, of what was overwritten

    def record(self, func, args, kwargs):
        """One operation of the capture."""
        before = [x.untyped_storage() for x in tensors_of(args, kwargs)]
        for storage in before if func._schema.is_mutable else ():
            if id(storage) not in self.made:
                self.saved.setdefault(id(storage), (storage, storage.clone()))
        found = func(*args, **kwargs)
        self.operations.append((func, args, kwargs, found))
        for x in tensors_of(found):
            if not any(x.untyped_storage() is storage for storage in before):
                self.made[id(x.untyped_storage())] = x
        return found

    @contextmanager
    def capture(self, pool=None):
        if pool is not None and not self.gpu.pools[pool]:
            refuse("a pool of memory whose graphs are all gone")
        self.id = pool or (0, len(self.gpu.pools) + 1)
        self.gpu.pools.setdefault(self.id, weakref.WeakSet()).add(self)
        self.gpu.graph = self
        try:
            yield
        finally:
            self.gpu.graph = None
        with _disable_current_modes():  # in truth no operation has run yet
            for x in self.made.values():
                spoil(x)
            for storage, content in self.saved.values():
                storage.copy_(content)

    @torch.inference_mode()
    def replay(self):
        with torch._C.DisableTorchFunction():
            for func, args, kwargs, found in self.operations:
                with self.gpu.making(tensors_of(found)):
                    again = func(*args, **kwargs)
                for x, new in zip(tensors_of(found), tensors_of(again), strict=True):
                    if x.untyped_storage() is not new.untyped_storage():
                        x.copy_(new)

    def pool(self):
        return self.id


class Event:
    """torch.cuda.Event: the copies before it was recorded, none if it never was."""

    gpu = None

    def __init__(self, enable_timing=False):
        self.until = 0

    def record(self):
        self.until = self.gpu.copies

    def synchronize(self):
        self.gpu.note("synchronize", until=self.until)

    def elapsed_time(self, end):
        return 1.0


def stand_ins(gpu):
    """What takes the place of functions and classes of torch.cuda."""
    stream = SimpleNamespace(wait_stream=lambda other: None)  # all happens in one order
    answers = dict(is_available=True, device_count=1, get_device_name="pretended")
    answers |= dict(is_bf16_supported=True, get_device_capability=(9, 0), current_device=0)
    answers |= dict(memory_allocated=0, max_memory_allocated=2**20, stream=nullcontext())
    answers |= dict(Stream=stream, current_stream=stream, get_rng_state=torch.zeros(16).byte())
    answers |= dict(is_current_stream_capturing=False)
    nothing = ("empty_cache", "reset_peak_memory_stats", "set_device", "set_rng_state")
    answers |= dict.fromkeys(nothing)
    return dict(
        {name: lambda *_, value=value, **__: value for name, value in answers.items()},
        CUDAGraph=type("CUDAGraph", (Graph,), {"gpu": gpu}),
        Event=type("Event", (Event,), {"gpu": gpu}),
        graph=lambda graph, pool=None, stream=None: graph.capture(pool),
        synchronize=lambda device=None: gpu.note("synchronize"),
    )


@contextmanager
def pretended_cuda():
    """Within it torch has a `cuda:0`. -> Gpu"""
    gpu = Gpu()
    run, group = torch.autograd._engine_run_backward, torch._C._group_tensors_by_device_and_dtype

    def of_cpu(owner, name):
        own = getattr(owner, name)

        def called(*args, **kwargs):
            kwargs = {key: "cpu" if x == "cuda" else x for key, x in kwargs.items()}
            return own(*("cpu" if x == "cuda" else x for x in args), **kwargs)

        return patch.object(owner, name, called)

    def grouped(tensors, with_indices=False):  # as an optimizer does it, by the devices it sees
        found = {}
        for (_, dtype), (lists, indices) in group(tensors, with_indices).items():
            found[next(x for x in lists[0] if x is not None).device, dtype] = lists, indices
        return found

    def backward(outputs, *args, **kwargs):  # torch has left Above, but may run a pass again
        with gpu.making(outputs), Above(gpu):
            return run(outputs, *args, **kwargs)

    with (
        patch.multiple(torch.cuda, **stand_ins(gpu)),
        of_cpu(torch.autocast, "__init__"),
        of_cpu(torch, "is_autocast_enabled"),
        of_cpu(torch, "get_autocast_dtype"),
        patch.object(torch.autograd, "_engine_run_backward", backward),
        patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped),
        patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=place),
        gpu,
        Above(gpu),
    ):
        yield gpu
