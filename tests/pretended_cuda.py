"""A GPU that is not there: all of the project runs as on `cuda:0`, by the arithmetic of the CPU.

    with pretended_cuda() as gpu:
        train(replace(config, device="cuda"))
    print(gpu.seen("wait"), gpu.seen("h2d"))

A tensor is on the device if its storage is marked so; views, parameters and gradients share it. Two
modes of torch see to it: Above is where Python calls torch and asks for `x.device`, Gpu is where
torch calls its kernels, in the backward pass, too. They count waits and copies, and refuse, with
the project's line that did it, tensors of both devices in one operation, and waits in the capture
of a CUDA graph. Where a copy to the host does not block, there is garbage until the host waits.

They cannot see: waits inside a kernel of CUDA, in a package that is not torch, in another thread or
process; streams that race; memory; rounding.
Autocast does nothing.
"""

import re
import sys
from collections import Counter
from contextlib import contextmanager, nullcontext
from pathlib import Path
from unittest.mock import MagicMock, patch

import torch
import torch._dynamo  # keeps torch's types for good, so not those that are pretended here
import torch.nn.functional as F
from torch.overrides import TorchFunctionMode
from torch.utils import checkpoint
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes
from torch.utils._pytree import tree_leaves

OURS = re.compile(re.escape(f"{Path(__file__).parent.parent}/") + r"(?!\.venv/)(.*)")
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
    while (file := frame.f_code.co_filename) == __file__ or not OURS.fullmatch(file):
        frame = frame.f_back
    return OURS.fullmatch(file)[1], frame.f_lineno, frame.f_code.co_qualname


def refuse(message):
    raise Misplaced("{}:{} in {}: ".format(*here()) + message)


def place(x):
    """Where a tensor is: 'cuda', 'pinned' (memory of the host) or 'cpu'."""
    return getattr(x.untyped_storage(), "place", "cpu")


def put(x, where):
    """Mark the storage of a tensor. -> x"""
    x.untyped_storage().place = where
    return x


def on_cuda(x):
    return place(x) == "cuda"


def tensors_of(*found):
    """The tensors in nested lists, tuples and dicts."""
    return [x for x in tree_leaves(found) if isinstance(x, T)]


class Gpu(TorchDispatchMode):
    """The pretended device, where torch calls its kernels: what happened, and what is under way."""

    def __init__(self):
        super().__init__()
        self.counts = Counter()  # of (wait, h2d or d2h; file, function, what)
        self.captured = None  # the operations of the graph that is being captured
        self.default = "cpu"  # where a kernel without tensors makes one: in what torch calls now
        self.under_way = []  # copies to the host that do not block: where to, and of what

    def seen(self, kind):
        """{(file, function, what): how often there was a 'wait' of the host, or a copy to the
        device, 'h2d', or back, 'd2h'}."""
        return Counter({key[1:]: n for key, n in self.counts.items() if key[0] == kind})

    def note(self, what, way=None, waits=True):
        """Something happens: a copy, or a wait for all that is under way."""
        if self.captured is not None:
            return waits and refuse(f"{what} waits for the device while a graph is captured")
        file, _, function = here()
        for kind in [way] * (way is not None) + ["wait"] * waits:
            self.counts[kind, file, function, what] += 1
        if waits:
            done, self.under_way = self.under_way, []
            with torch.inference_mode():
                for host, content in done:
                    host.copy_(content)

    @contextmanager
    def making(self, tensors, cuda=False):
        """What torch makes within it without any tensor is where these are."""
        before = self.default
        self.default = "cuda" if cuda or any(map(on_cuda, tensors)) else "cpu"
        try:
            yield
        finally:
            self.default = before

    @torch.inference_mode()
    def copied(self, source, target, blocks):
        """Note the copy of a tensor into another, if it goes from device to device."""
        if (down := on_cuda(source)) == on_cuda(target):
            return
        host = target if down else source
        blocks = blocks or place(host) != "pinned"  # then CUDA may wait, too
        self.note("copy", "d2h" if down else "h2d", blocks)
        if down and not blocks and self.captured is None:
            self.under_way.append((host, host.clone()))
            host.fill_(torch.nan if host.is_floating_point() else 10**9)  # none takes it for a result

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        kernel, tensors = func.overloadpacket, tensors_of(args, kwargs)
        with torch._C.DisableTorchFunction():
            with self:  # in inference mode an operation made of others comes as a whole
                found = func.decompose(*args, **kwargs)
            if found is not NotImplemented:
                return found
            if (on := any(map(on_cuda, tensors))) and kernel not in BOTH_DEVICES:
                self.check(func, args, tensors)
            found = func(*args, **kwargs)
        if self.captured is not None:
            self.captured.append((func, args, kwargs, found))
        if kernel is aten.copy_:
            self.copied(args[1], args[0], not (args[2:] or kwargs.get("non_blocking")))
        elif on or (self.default == "cuda" and (not tensors or kernel is aten.lift_fresh)):
            for x in tensors_of(found):
                put(x, "cuda")
        return found

    def check(self, func, args, tensors):
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
            T.is_cpu.__get__: lambda x: not on_cuda(x),
            T.pin_memory: lambda x: put(x.clone(), "pinned"),
            T.to: self.to,
            T.cpu: lambda x: self.move(x, "cpu"),
            T.tolist: lambda x: T.tolist(self.move(x, "cpu")),
            T.numpy: lambda x: refuse("cuda:0 has no numpy") if on_cuda(x) else T.numpy(x),
            torch.tensor: self.tensor,
            # With a number of classes CUDA does not look at the values; the CPU does.
            F.one_hot: lambda x, n: put(torch.eye(n, dtype=torch.long), place(x))[x],
        }

    def __torch_function__(self, func, types, args=(), kwargs=None):
        kwargs = dict(kwargs or {})
        if func in self.own:
            return self.own[func](*args, **kwargs)
        device, pinned = kwargs.get("device"), kwargs.pop("pin_memory", False)
        if cuda := str(device).startswith("cuda"):
            kwargs["device"] = "cpu"
        with self.gpu.making(tensors_of(args, kwargs), cuda):
            x = func(*args, **kwargs)
        if pinned or device is not None:  # also zeros_like(x, device="cpu")
            put(x, "pinned" if pinned else "cuda" if cuda else "cpu")
        return x

    def move(self, x, device, dtype=None, blocks=True, copy=False):
        """Tensor.to, for each pair of devices."""
        dtype, cuda = dtype or x.dtype, str(device).startswith("cuda")
        if device is None or cuda == on_cuda(x):
            return T.to(x, dtype, copy=copy)
        y = put(T.to(x, dtype, copy=True), "cuda" if cuda else "cpu" if blocks else "pinned")
        self.gpu.copied(x, y.detach(), blocks)
        return y

    def to(self, x, *args, copy=False, **kwargs):
        if args and isinstance(args[0], T):
            args = CUDA if on_cuda(args[0]) else "cpu", args[0].dtype, *args[1:]
        device, dtype, non_blocking, _ = torch._C._nn._parse_to(*args, **kwargs)
        return self.move(x, device, dtype, not non_blocking, copy)

    def tensor(self, data, *, device=None, **kwargs):
        data = [x.item() if isinstance(x, T) else x for x in data] if type(data) is list else data
        with self.gpu.making(()):
            return self.move(torch.tensor(data, **kwargs), device)


class Graph:
    """torch.cuda.CUDAGraph: a list of operations. Their capture runs them, and so stands for the
    first replay, which does nothing."""

    def __init__(self):
        self.operations, self.replays, self.pool = [], 0, lambda: None

    @torch.inference_mode()
    def replay(self):
        with torch._C.DisableTorchFunction(), _disable_current_modes():
            for func, args, kwargs, found in self.operations if self.replays else ():
                again = func(*args, **kwargs)
                for x, new in zip(tensors_of(found), tensors_of(again), strict=True):
                    if x.untyped_storage() is not new.untyped_storage():
                        x.copy_(new)
        self.replays += 1


@contextmanager
def pretended_cuda():
    """Within it torch has a `cuda:0`. -> Gpu"""
    gpu = Gpu()
    run, group = torch.autograd._engine_run_backward, torch._C._group_tensors_by_device_and_dtype

    def grouped(tensors, with_indices=False):  # as an optimizer does it, by the devices it sees
        found = {}
        for (_, dtype), (lists, indices) in group(tensors, with_indices).items():
            found[next(x for x in lists[0] if x is not None).device, dtype] = lists, indices
        return found

    def backward(outputs, *args, **kwargs):  # torch has left Above, but may run a pass again
        with gpu.making(outputs), Above(gpu):
            return run(outputs, *args, **kwargs)

    wait = lambda device=None: gpu.note("synchronize")  # noqa: E731
    event = MagicMock(synchronize=wait, elapsed_time=lambda end: 1.0)  # waits for all, too
    cuda = MagicMock(synchronize=wait, Event=lambda **_: event, CUDAGraph=Graph)
    cuda.graph = lambda graph, **_: patch.object(gpu, "captured", graph.operations)
    cuda.device_count.return_value = 1
    cuda.memory_allocated.return_value = cuda.memory_reserved.return_value = 0
    cuda.max_memory_allocated.return_value, cuda.mem_get_info.return_value = 0, (2**40, 2**40)
    cuda._is_compiled.return_value = cuda.is_current_stream_capturing.return_value = False
    cuda.get_device_name.return_value = "a pretended GPU"
    cuda.get_device_capability.return_value = (9, 0)
    cuda.get_rng_state.return_value = torch.zeros(16, dtype=torch.uint8)
    with (
        patch.object(torch, "cuda", cuda),
        patch.object(torch, "autocast", lambda *_, **__: nullcontext()),
        patch.object(torch.autograd, "_engine_run_backward", backward),
        patch.object(torch._C, "_group_tensors_by_device_and_dtype", grouped),
        patch.dict(checkpoint._allowed_determinism_checks_to_fns, default=place),
        gpu,
        Above(gpu),
    ):
        yield gpu
