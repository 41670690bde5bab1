"""The operations that the root runs have kernels on the GPUs of NVIDIA and of Apple, as far as torch's
list of kernels tells: neither is here."""

from importlib.resources import files

import pytest
import torch
import yaml
from torch.utils._python_dispatch import TorchDispatchMode

from model import Config, PonderLM
from sample import stream
from train import TrainConfig, make_optimizer, objective

SMALL = dict(vocab_size=31, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=2)


class Recorder(TorchDispatchMode):
    """The names of the operations that torch calls its kernels for."""

    def __init__(self):
        super().__init__()
        self.names = set()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.namespace == "aten":  # and not torch's profiler
            self.names.add(func.name().removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


def recorded():
    """The operations of a training step with a penalty and a price, of an evaluation, and of decoded
    tokens."""
    torch.manual_seed(0)
    model = PonderLM(Config(**SMALL, block_size=16, ponder_steps=2, penalty="token"))
    optimizer = make_optimizer(model, TrainConfig())
    idx = torch.randint(31, (2, 16))
    with Recorder() as recorder:
        loss, _, _ = objective(model.train(), idx, idx, 1, price=0.1)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        with torch.no_grad():
            model.eval()(idx, idx, tau=0.1)
        list(stream(model, [1, 2], 3, temperature=0.8, top_k=5, seed=0))
    return recorder.names


def kernels():
    """{name of an operation: the entry of torch's list}"""
    text = (files("torchgen") / "packaged/ATen/native/native_functions.yaml").read_text("utf-8")
    entries = yaml.load(text, Loader=getattr(yaml, "CSafeLoader", yaml.SafeLoader))
    return {entry["func"].partition("(")[0]: entry for entry in entries}


# Only a CPU runs these: a GPU takes another kernel of the same operation, which the list has, too.
FLASH = "_scaled_dot_product_flash_attention_for_cpu"
ON_CPU_ALONE = {
    FLASH: "_scaled_dot_product_efficient_attention",
    f"{FLASH}_backward": "_scaled_dot_product_efficient_attention_backward",
}


@pytest.mark.parametrize("device", ["CUDA", "MPS"])
def test_kernels(device):
    """Catches an operation that a GPU of NVIDIA or of Apple cannot run. What is composed of others has no
    kernel of its own, and needs none."""
    known, missing = kernels(), []
    names = recorded()
    assert len(names) > 60
    for name in sorted(names):
        if name == "_fused_adamw_":  # train.py asks for it on a CPU and on CUDA alone
            continue
        entry = known[ON_CPU_ALONE.get(name, name)]
        has = has_kernel(entry, known, device)
        if not has:
            missing.append(name)
    allowed = set(ON_CPU_ALONE) if device == "MPS" else set()
    assert not set(missing) - allowed


def has_kernel(entry, known, device):
    """Whether an entry of the list, or the structured one that it stands for, has a kernel."""
    dispatch = entry.get("dispatch")
    if "structured_delegate" in entry:
        return has_kernel(known[entry["structured_delegate"]], known, device)
    if "ufunc_inner_loop" in entry and device == "CUDA":  # of which torch makes the kernels
        return True
    if dispatch is None:  # composed of others
        return True
    keys = {key.strip() for names in dispatch for key in names.split(",")}
    return bool(keys & {device, "CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional",
                        "CompositeImplicitAutograd"})  # fmt: skip


def test_the_list_can_tell():
    """Catches a list by which everything has a kernel."""
    known = kernels()
    assert not has_kernel(known[FLASH], known, "CUDA")
    assert not has_kernel(known["_fused_adamw_"], known, "XPU_")
